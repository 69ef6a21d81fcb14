"""The policies in force and what the schedule cost, for /metrics: idle slots, recomputed tokens, the fitted step-time
model."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from ..engine.messages import EngineStats, PolicyState
from ..sched.step_time import COEFFICIENTS

COUNTERS = {
    "num_slot_steps": ("paceline:slot_steps", "Slots (max_num_seqs) of each step that ran a request, summed"),
    "num_idle_slot_steps": ("paceline:idle_slot_steps", "Of those, slots without a request that ran"),
    "num_recomputed_tokens": ("paceline:recomputed_tokens", "Tokens run again because a preemption had lost them"),
    "num_padding_rows": ("paceline:padding_rows", "Rows of finished requests that regime static_padded ran"),
}
POLICIES = ("regime", "ordering", "gate", "admission", "preemption", "victim", "chunking")


class ScheduleMetrics:
    def __init__(self, registry: CollectorRegistry, names: Sequence[str], values: Sequence[str]) -> None:
        self._counters = {attribute: Counter(name, text, names, registry=registry).labels(*values)
                          for attribute, (name, text) in COUNTERS.items()}
        terms = Gauge("paceline:step_time_seconds", "Fitted cost of one unit of each term of a step's duration",
                      (*names, "term"), registry=registry)
        self._terms = [terms.labels(*values, term) for term in COEFFICIENTS]
        self._error = Gauge("paceline:step_time_relative_error", "Running mean error of predicted step durations",
                            names, registry=registry).labels(*values)
        self._overrun = Gauge("paceline:step_time_overrun_seconds", "What steps with prompts beside decodes exceed "
                              "their prediction by, 98th percentile", names, registry=registry).labels(*values)
        self._policy = Gauge("paceline:policy_info", "The policies in force, as labels; always 1",
                             (*names, "preset", *POLICIES), registry=registry)
        self._values = tuple(values)
        self._shown: PolicyState | None = None
        self._last = dict.fromkeys(COUNTERS, 0)

    def show(self, policy: PolicyState | None) -> None:
        """None: not known yet."""
        if policy is None or policy == self._shown:
            return
        knobs = dict(policy.knobs)
        self._policy.clear()
        self._policy.labels(*self._values, policy.preset or "none", *(str(knobs[name]) for name in POLICIES)).set(1)
        self._shown = policy

    def take(self, stats: EngineStats) -> None:
        for attribute, counter in self._counters.items():
            counter.inc(getattr(stats, attribute) - self._last[attribute])
            self._last[attribute] = getattr(stats, attribute)
        for gauge, seconds in zip(self._terms, stats.step_time.coefficients, strict=True):
            gauge.set(seconds)
        self._error.set(stats.step_time.relative_error)
        self._overrun.set(stats.step_time.overrun_seconds)

"""What the schedule cost, for /metrics: idle slots, recomputed tokens, the fitted step-time model. From EngineStats."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from ..engine.messages import EngineStats
from ..sched.step_time import COEFFICIENTS

COUNTERS = {
    "num_slot_steps": ("paceline:slot_steps", "Slots (max_num_seqs) of each step that ran a request, summed"),
    "num_idle_slot_steps": ("paceline:idle_slot_steps", "Of those, slots without a request that ran"),
    "num_recomputed_tokens": ("paceline:recomputed_tokens", "Tokens run again because a preemption had lost them"),
    "num_padding_rows": ("paceline:padding_rows", "Rows of finished requests that regime static_padded ran"),
}


class ScheduleMetrics:
    def __init__(self, registry: CollectorRegistry, names: Sequence[str], values: Sequence[str]) -> None:
        self._counters = {attribute: Counter(name, text, names, registry=registry).labels(*values)
                          for attribute, (name, text) in COUNTERS.items()}
        terms = Gauge("paceline:step_time_seconds", "Fitted cost of one unit of each term of a step's duration",
                      (*names, "term"), registry=registry)
        self._terms = [terms.labels(*values, term) for term in COEFFICIENTS]
        self._error = Gauge("paceline:step_time_relative_error", "Running mean error of predicted step durations",
                            names, registry=registry).labels(*values)
        self._last = dict.fromkeys(COUNTERS, 0)

    def take(self, stats: EngineStats) -> None:
        for attribute, counter in self._counters.items():
            counter.inc(getattr(stats, attribute) - self._last[attribute])
            self._last[attribute] = getattr(stats, attribute)
        for gauge, seconds in zip(self._terms, stats.step_time.coefficients, strict=True):
            gauge.set(seconds)
        self._error.set(stats.step_time.relative_error)

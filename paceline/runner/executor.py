"""Runs plans on a model: plan -> arrays -> one call of the step runner -> result.

submit runs the step and returns when it is done; collect hands the result out. What a step drew is kept until the step
after it has been submitted, so that plan N+1 may be made (with LastSampled markers) before N is collected. That is a
step in flight, not a cache: drop_caches leaves it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..clock import Clock
from ..errors import InvariantError
from ..ops.interface import KVSpec, SamplingExtras, StepOutput, StepRunner
from ..sched.plan import (
    KVLayout,
    LastSampled,
    RowResult,
    SchedulerOutput,
    ScoredToken,
    StepResult,
    Ticket,
    TopLogprobs,
)
from .batch import BatchBuilder


@dataclass(frozen=True, slots=True, eq=False)
class FinishedStep:
    """Our ticket: the step has run."""

    plan: SchedulerOutput
    output: StepOutput
    extras: SamplingExtras | None
    duration_seconds: float
    without_input: frozenset[str] = frozenset()    # rows that went on from a draw that had failed


class ModelExecutor:
    """Executes plans on one step runner. keep_logits keeps the logits of the last step, for goldens."""

    def __init__(self, runner: StepRunner, kv: KVSpec, clock: Clock, keep_logits: bool = False,
                 num_groups: int = 1) -> None:
        self.last_logits: NDArray[np.float32] | None = None
        self._runner, self._kv, self._clock, self._keep_logits = runner, kv, clock, keep_logits
        self._batches = BatchBuilder(num_groups)
        self._num_groups = num_groups
        self._last_sampled: dict[str, int] = {}

    def submit(self, plan: SchedulerOutput) -> FinishedStep:
        started_at = self._clock.now()
        batch = self._batches.build(plan, self._last_sampled)
        without_input = _without_input(plan, self._last_sampled)
        output = self._runner.step(batch, self._keep_logits)
        self.last_logits = output.logits
        self._last_sampled = _last_tokens(plan, output)
        duration_seconds = self._clock.now() - started_at
        return FinishedStep(plan, output, batch.sampling.extras, duration_seconds, without_input)

    def collect(self, ticket: Ticket) -> StepResult:
        """A row whose logits were not finite says so in its result; rows do not see each other, so the rest holds."""
        if not isinstance(ticket, FinishedStep):
            raise InvariantError(f"not a ticket of this executor: {ticket!r}")
        plan, output = ticket.plan, ticket.output
        rows = _row_results(plan, output, ticket.extras)
        if ticket.without_input or (len(output.token_ids) and output.token_ids.min() < 0):
            rows = tuple(_checked(row, ticket.without_input) for row in rows)
        return StepResult(plan.step_id, rows, ticket.duration_seconds,
                          tuple(transfer.transfer_id for transfer in plan.transfers))

    def kv_layout(self) -> KVLayout:
        return KVLayout(self._kv.num_blocks, self._kv.block_size, self._kv.bytes_per_block, self._num_groups)

    def drop_caches(self) -> None:
        """Changes nothing but the time of the next step."""
        self._batches.drop_caches()

    def close(self) -> None:
        self._runner.close()


def _row_results(plan: SchedulerOutput, output: StepOutput, extras: SamplingExtras | None) -> tuple[RowResult, ...]:
    token_ids, logprobs = output.token_ids.tolist(), output.logprobs.tolist()
    best = _best_tokens(output, extras) if extras is not None else {}
    results: list[RowResult] = []
    start = 0
    for row in plan.rows:
        scored: tuple[ScoredToken, ...] = ()
        if row.scored is not None:
            first, start = start, start + row.num_scored
            scored = tuple(ScoredToken(token_ids[at], logprobs[at], best[at]) for at in range(first, start))
        end = start + len(row.logits_offsets)
        num_top = None if row.sampling is None else row.sampling.params.logprobs
        results.append(RowResult(
            row.request_id, tuple(token_ids[start:end]), None if num_top is None else tuple(logprobs[start:end]),
            top_logprobs=tuple(best[at] for at in range(start, end)) if num_top else None, scored=scored))
        start = end
    return tuple(results)


def _best_tokens(output: StepOutput, extras: SamplingExtras) -> dict[int, TopLogprobs]:
    """By wanted position, of those that have an entry in the extras."""
    if output.top_ids is None or output.top_logprobs is None:
        raise InvariantError("a batch with extras brought no best tokens")
    rows = zip(extras.rows.tolist(), extras.num_top.tolist(), output.top_ids.tolist(), output.top_logprobs.tolist(),
               strict=True)
    return {row: tuple(one for one in list(zip(ids, logprobs, strict=True))[:num_top] if one[0] >= 0)
            for row, num_top, ids, logprobs in rows}


def _last_tokens(plan: SchedulerOutput, output: StepOutput) -> dict[str, int]:
    """The last token each row drew, -1 if it failed; rows that drew none are absent."""
    token_ids = output.token_ids.tolist()
    last: dict[str, int] = {}
    end = 0
    for row in plan.rows:
        end += len(row.logits_offsets) + row.num_scored
        if row.logits_offsets:
            last[row.request_id] = token_ids[end - 1]
    return last


def _without_input(plan: SchedulerOutput, last_sampled: Mapping[str, int]) -> frozenset[str]:
    """Rows that stand on a token which the step before failed to draw."""
    failed = {request_id for request_id, token_id in last_sampled.items() if token_id < 0}
    if not failed:
        return frozenset()
    return frozenset(row.request_id for row in plan.rows
                     if row.request_id in failed and LastSampled.TOKEN in row.token_ids)


def _checked(row: RowResult, without_input: frozenset[str]) -> RowResult:
    """The row, or its failure where it has no usable token."""
    if row.request_id in without_input:
        return RowResult(row.request_id, failure="the step before this one drew no token")
    if min((*row.token_ids, *(one.token_id for one in row.scored)), default=0) < 0:
        return RowResult(row.request_id, failure="the model's logits are not finite")
    return row

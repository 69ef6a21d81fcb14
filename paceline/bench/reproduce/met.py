"""What requests met in a run of an engine core, as the records that every figure of the lab is computed from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ...engine.messages import RequestOutput
from ...request import FinishReason
from ...sched.plan import SchedulerOutput, StepResult
from ..records import RequestRecord

GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass
class Met:
    """Told of each piece of news (see sim/run.py). Times of the records count from started_at, on the same clock."""

    cell: str
    started_at: float
    asked_output_tokens: dict[str, int]
    records: list[RequestRecord] = field(default_factory=list)
    _times: dict[str, list[float]] = field(default_factory=dict)
    _counts: dict[str, list[int]] = field(default_factory=dict)

    def __call__(self, output: RequestOutput, now: float) -> None:
        times = self._times.setdefault(output.request_id, [])
        counts = self._counts.setdefault(output.request_id, [])
        if output.token_ids:
            times.append(now - self.started_at)
            counts.append(len(output.token_ids))
        if output.finish_reason is not None:
            self._end(output, now - self.started_at)

    def _end(self, output: RequestOutput, at: float) -> None:
        times, counts = self._times.pop(output.request_id), self._counts.pop(output.request_id)
        timeline = output.timeline
        arrived_at = at if timeline is None else timeline.arrived_at - self.started_at
        is_good = output.finish_reason in GOOD_ENDS
        self.records.append(RequestRecord(
            request_id=output.request_id, cell=self.cell, status="ok" if is_good else "dropped",
            error=None if is_good else f"ended by {output.finish_reason}", intended_at=arrived_at, sent_at=arrived_at,
            token_times=tuple(times), token_counts=tuple(counts), ended_at=at, counted_by="token_ids",
            asked_output_tokens=self.asked_output_tokens[output.request_id], output_tokens=sum(counts),
            asked_prompt_tokens=output.num_prompt_tokens, prompt_tokens=output.num_prompt_tokens,
            cached_tokens=output.num_cached_tokens, finish_reason=None if output.finish_reason is None
            else output.finish_reason.value, preemptions=None if timeline is None else timeline.num_preemptions))


@dataclass
class Refusals:
    """A listener: steps in which the head of the queue did not start, by the limit that said no."""

    steps: Counter[str] = field(default_factory=Counter)

    def on_step(self, plan: SchedulerOutput, result: StepResult) -> None:
        if plan.refusal is not None:
            self.steps[plan.refusal.limit] += 1

    def on_request_finished(self, output: RequestOutput) -> None:
        pass

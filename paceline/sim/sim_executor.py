"""An executor without a model: it spends predicted time on a virtual clock and answers with placeholder tokens.

What a schedule decides hangs on lengths, ends and durations only, so the scheduler above cannot tell. It keeps nothing
of a request between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ..clock import VirtualClock
from ..errors import InvariantError
from ..sched.plan import KVLayout, RowResult, ScheduledRequest, SchedulerOutput, StepResult, Ticket

PLACEHOLDER = 0
END = 1    # the model's end of a text, for requests whose length the scheduler is not to know

StepSeconds: TypeAlias = Callable[[SchedulerOutput], float]


class SimExecutor:
    """Runs plans in no time at all.

    step_seconds: what a plan takes; None: each step is one unit of time, and reports no duration, since there is
    nothing to learn from it. ends_at: by request, the number of computed tokens at which it draws END instead of a
    placeholder (num_prompt_tokens + num_output_tokens - 1); one that is not named ends where max_tokens say.
    """

    def __init__(self, layout: KVLayout, clock: VirtualClock, step_seconds: StepSeconds | None = None,
                 ends_at: Mapping[str, int] | None = None) -> None:
        self._layout, self._clock, self._step_seconds = layout, clock, step_seconds
        self._ends_at = ends_at or {}

    def submit(self, plan: SchedulerOutput) -> SchedulerOutput:
        return plan

    def collect(self, ticket: Ticket) -> StepResult:
        if not isinstance(ticket, SchedulerOutput):
            raise InvariantError(f"not a ticket of this executor: {ticket!r}")
        seconds = 0.0 if self._step_seconds is None else self._step_seconds(ticket)
        self._clock.advance(1.0 if self._step_seconds is None else seconds)
        rows = tuple(self._result(row) for row in ticket.rows)
        return StepResult(ticket.step_id, rows, seconds, tuple(one.transfer_id for one in ticket.transfers))

    def kv_layout(self) -> KVLayout:
        return self._layout

    def _result(self, row: ScheduledRequest) -> RowResult:
        if not row.logits_offsets:
            return RowResult(row.request_id)
        is_end = row.num_computed_tokens + len(row.token_ids) == self._ends_at.get(row.request_id)
        return RowResult(row.request_id, (END,) if is_end else (PLACEHOLDER,) * len(row.logits_offsets))

"""One step under construction: rows, copies, victims and the budget that is left. Built once, then frozen."""

from __future__ import annotations

from .plan import Preempted, Refusal, ScheduledRequest, SchedulerOutput, Transfer

# Prompt tokens scored in a step, of all rows together. Each takes a row of logits, 600 kB with a vocabulary of 150,000:
# this bounds them to some 80 MB; prompts that want it run in smaller pieces. Pieces change no bit of the result.
MAX_SCORED_TOKENS = 128


class StepBuilder:
    """Collects what the scheduler decides; decides nothing."""

    def __init__(self, step_id: int, token_budget: int) -> None:
        self.step_id = step_id
        self.budget_left = token_budget
        self.scored_left = MAX_SCORED_TOKENS
        self.refusal: Refusal | None = None
        self._rows: list[ScheduledRequest] = []
        self._transfers: list[Transfer] = []
        self._preempted: list[Preempted] = []

    @property
    def has_preempted(self) -> bool:
        return bool(self._preempted)

    def add_row(self, row: ScheduledRequest) -> None:
        self._rows.append(row)
        self.budget_left -= len(row.token_ids)
        if row.scored is not None:
            self.scored_left -= len(row.scored.token_ids)

    def add_transfer(self, transfer: Transfer) -> None:
        self._transfers.append(transfer)

    def add_preempted(self, preempted: Preempted) -> None:
        self._preempted.append(preempted)

    def build(self, num_waiting: int, num_running: int) -> SchedulerOutput:
        return SchedulerOutput(
            step_id=self.step_id,
            rows=tuple(self._rows),
            transfers=tuple(self._transfers),
            preempted=tuple(self._preempted),
            refusal=self.refusal,
            num_waiting=num_waiting,
            num_running=num_running,
        )

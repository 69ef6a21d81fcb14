"""One step under construction: rows, copies, victims and the budget that is left. Built once, then frozen."""

from __future__ import annotations

from collections.abc import Iterable

from ..kv.manager import KVCacheManager
from ..request import Request, SamplingParams
from .lookback import history_of, scored_by
from .plan import Preempted, Refusal, SamplingRef, ScheduledRequest, SchedulerOutput, Transfer
from .transfers import CopiesUnderWay

# Prompt tokens scored in a step, of all rows together. Each takes a row of logits, 600 kB with a vocabulary of 150,000:
# this bounds them to some 80 MB; prompts that want it run in smaller pieces. Pieces change no bit of the result.
MAX_SCORED_TOKENS = 128
FIRST_OFFSET = (0,)    # the logits of a one-token row; one object for all of them
PADDING = SamplingRef(SamplingParams(max_tokens=1, temperature=0.0), prompt_index=0, choice_index=0)


class StepBuilder:
    """Collects what the scheduler decides; decides nothing. Takes the blocks that a row needs as it adds it."""

    def __init__(self, step_id: int, token_budget: int, kv: KVCacheManager, copies: CopiesUnderWay) -> None:
        self.step_id = step_id
        self.budget_left = token_budget
        self.scored_left = MAX_SCORED_TOKENS
        self.refusal: Refusal | None = None
        self.num_started = 0
        self.is_short_of_blocks = False    # somebody had to yield, or to stand still
        self._kv = kv
        self._copies = copies
        self._rows: list[ScheduledRequest] = []
        self._padding: list[ScheduledRequest] = []
        self._ids: set[str] = set()
        self._transfers: list[Transfer] = []
        self._preempted: list[Preempted] = []

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def has_row_of(self, request_id: str) -> bool:
        return request_id in self._ids

    def add_row(self, request: Request, ref: SamplingRef, num_new_tokens: int) -> None:
        """The next tokens of a request."""
        self._make_writable(request, num_new_tokens)
        row = row_of(request, ref, num_new_tokens)
        self._ids.add(row.request_id)
        self._rows.append(row)
        self.budget_left = max(self.budget_left - num_new_tokens, 0)    # a whole prompt may exceed it
        if row.scored is not None:
            self.scored_left -= len(row.scored.token_ids)

    def add_padding(self, requests: Iterable[Request]) -> None:
        """Requests that have ended run their last token on beside the others, as far as blocks and budget allow. It is
        written to a position that nobody reads."""
        for request in requests:
            has_room = self._kv.num_blocks_to_continue(request, 1) <= self._kv.num_free_blocks
            if self._rows and self.budget_left and has_room:
                self._make_writable(request, 1)
                start = request.num_computed_tokens
                self._padding.append(ScheduledRequest(request.request_id, start, request.token_ids(start, start + 1),
                                                      request.block_tables, FIRST_OFFSET, PADDING))
                self.budget_left -= 1

    def _make_writable(self, request: Request, num_new_tokens: int) -> None:
        for copy in self._kv.allocate(request, num_new_tokens):
            self._transfers.append(self._copies.begin(copy))

    def add_preempted(self, preempted: Preempted) -> None:
        self._preempted.append(preempted)
        self.is_short_of_blocks = True

    def build(self, num_waiting: int, num_running: int, num_slots: int) -> SchedulerOutput:
        return SchedulerOutput(
            step_id=self.step_id,
            rows=tuple(self._rows),
            transfers=tuple(self._transfers),
            preempted=tuple(self._preempted),
            refusal=self.refusal,
            num_waiting=num_waiting,
            num_running=num_running,
            num_started=self.num_started,
            padding=tuple(self._padding),
            num_idle_slots=max(num_slots - len(self._rows), 0) if self._rows else 0,
        )


def row_of(request: Request, ref: SamplingRef, num_new_tokens: int) -> ScheduledRequest:
    """The request's next tokens as a row; its blocks are there already."""
    start = request.num_computed_tokens
    is_sampled = start + num_new_tokens == request.num_tokens
    offsets = FIRST_OFFSET if num_new_tokens == 1 else (num_new_tokens - 1,)
    return ScheduledRequest(
        request_id=request.request_id,
        num_computed_tokens=start,
        token_ids=request.token_ids(start, start + num_new_tokens),
        block_ids=request.block_tables,
        logits_offsets=offsets if is_sampled else (),
        sampling=ref if is_sampled else None,
        history=history_of(request) if is_sampled and ref.looks_back else None,
        scored=None if ref.is_plain else scored_by(request, num_new_tokens),
    )

"""Who runs in the next step, and what became of it. Owns every accepted request from add to its one end.

A step is schedule -> (an executor runs the plan) -> update. Policies answer, this file acts: decide, then commit.
  - Running requests stand in the ordering's order. One yields its blocks only to one ahead of it, so the first always
    progresses, and nobody already in this step's plan can become a victim.
  - Nobody is admitted in a step that preempted, nor past a head of the queue that was refused.
  - While a plan is in flight no block goes back to the pool: an abort then ends the request, update frees its blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from ..config import SchedulerConfig
from ..errors import InvariantError, RequestError
from ..kv.manager import KVCacheManager
from ..kv.prefix_hash import MISS, PrefixHit
from ..request import Request, RequestStatus
from .choices import Choices, choice_id
from .counters import Counters
from .deadlines import Deadlines
from .finish import ABORTED, EXPIRED, FAILED, Finish, FinishRules, append_tokens
from .limits import Limits, check_fits, parent_of_fork
from .lookback import has_unscored, history_of, news_of_scores, num_tokens_within, sampling_ref_of, scored_by
from .ordering import OrderingKey, WaitQueue
from .outputs import EngineStats, RequestOutput, ended_before_birth, output_of
from .plan import (
    Preempted,
    Refusal,
    RowResult,
    SamplingRef,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
)
from .policies import Policies
from .preemption import Yield
from .step_builder import StepBuilder
from .transfers import CopiesUnderWay
from .view import Observations, SchedulerView

FIRST_OFFSET = (0,)    # the logits of a one-token row; one object for all of them


class Scheduler:
    """Queue, running batch and KV bookkeeping of one engine. Pure: time comes in as `now`."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        policies: Policies,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.config = config
        self.kv = kv
        self.policies = policies
        self.limits = Limits(kv.num_tokens_that_fit(max_model_len))
        self.running: list[Request] = []      # in the ordering's order
        self.waiting = WaitQueue(policies.ordering)
        self.observations = Observations()
        self._finish_rules = FinishRules(eos_token_ids, self.limits.max_model_len)
        self._requests: dict[str, Request] = {}             # every unfinished one
        self._sampling_refs: dict[str, SamplingRef] = {}
        self._choices = Choices()
        self._counters = Counters()
        self._in_flight: SchedulerOutput | None = None
        self._ended_in_flight: list[Request] = []           # their blocks are freed when the plan has landed
        self._copies = CopiesUnderWay()
        self._deadlines = Deadlines()
        self._next_step_id = 0

    # --- requests come and go

    @property
    def max_model_len(self) -> int:
        """The effective limit: the model's, or less where the whole KV pool holds less."""
        return self.limits.max_model_len

    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Accepts a request, or raises RequestError and changes nothing."""
        check_fits(request.num_prompt_tokens, request.sampling.max_tokens, self.limits)
        if request.num_choices < 1:
            raise RequestError(f"n: must be at least 1, got {request.num_choices}", param="n")
        ids = [request.request_id] + [choice_id(request.request_id, i) for i in range(1, request.num_choices)]
        for request_id in ids:
            self._refuse_taken_id(request_id)
        self._choices.expect(request)
        self._accept(request)
        self.waiting.push(request, self._view(request.arrival_time))

    def fork(self, parent_id: str, child: Request) -> None:
        """The child goes on from where the running parent stands, on the same blocks; it ends with its parent's abort.

        It brings the parent's tokens; those the parent has computed are not computed again.
        """
        parent = parent_of_fork(self._requests, parent_id, child)
        check_fits(child.num_tokens, None, self.limits)
        self._refuse_taken_id(child.request_id)
        self._choices.add(parent_id, child.request_id)
        self._start_fork(parent, child, self._view(child.arrival_time))

    def abort(self, request_ids: Iterable[str], now: float) -> list[RequestOutput]:
        """Ends these and all their choices, born or not. Unknown and finished ids are no error."""
        return self._end_families(request_ids, ABORTED, now)

    def expire(self, now: float) -> list[RequestOutput]:
        """Ends those whose deadline has come, with all their choices."""
        return self._end_families(self._deadlines.due(now), EXPIRED, now)

    def output_token_ids(self, request_id: str) -> Sequence[int] | None:
        """What an unfinished request has generated so far; None for any other."""
        request = self._requests.get(request_id)
        return None if request is None else request.output_token_ids

    def switch_policies(self, policies: Policies) -> None:
        """Swaps the whole bundle between two steps; those who wait and those who run are put in the new order."""
        self.policies = policies
        view = self._view(0.0)
        self.waiting = self.waiting.reordered(policies.ordering, view)
        self.running.sort(key=lambda request: policies.ordering.key(request, view))

    def stats(self) -> EngineStats:
        return self._counters.stats(self.kv, num_running=len(self.running), num_waiting=len(self.waiting))

    def check(self) -> None:
        """Raises InvariantError unless requests, queues and blocks agree. For tests and debugging."""
        self.kv.check((*self._requests.values(), *self._ended_in_flight))
        queued = [*self.running, *self.waiting]
        if len(queued) != len(self._requests) or any(self._requests.get(r.request_id) is not r for r in queued):
            raise InvariantError("an unfinished request is in no queue, or in two")
        if any(request.block_tables for request in self.waiting):
            raise InvariantError("a waiting request holds blocks")

    # --- schedule

    def schedule(self, now: float) -> SchedulerOutput:
        """The plan of the next step. Its update must come before the next schedule."""
        if self._in_flight is not None:
            raise InvariantError(f"step {self._in_flight.step_id} has not been updated")
        view = self._view(now)
        step = StepBuilder(self._next_step_id, self.config.max_num_batched_tokens)
        if not self.policies.ordering.is_static:
            self.running.sort(key=lambda request: self.policies.ordering.key(request, view))
        self._continue_running(view, step)
        if not step.has_preempted:    # blocks are short: admitting now would thrash
            self._admit_waiting(view, step)
        self._next_step_id += 1
        self._in_flight = step.build(num_waiting=len(self.waiting), num_running=len(self.running))
        return self._in_flight

    def _continue_running(self, view: SchedulerView, step: StepBuilder) -> None:
        num_decodes_behind = sum(1 for request in self.running if request.num_uncomputed_tokens == 1)
        for request in tuple(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue                                    # became a victim earlier in this pass
            if step.budget_left == 0:
                break
            num_decodes_behind -= request.num_uncomputed_tokens == 1
            num_wanted = self._num_tokens_to_run(request, step)
            num_new_tokens = self.policies.chunking(view, num_wanted, step.budget_left, num_decodes_behind)
            if num_new_tokens and self._make_room(request, num_new_tokens, view, step):
                self._add_row(request, num_new_tokens, step)

    def _num_tokens_to_run(self, request: Request, step: StepBuilder) -> int:
        # A parent waits one token before the end of its prompt, where its choices part.
        num_tokens = request.num_uncomputed_tokens - self._choices.is_expecting(request)
        if request.sampling.prompt_logprobs is None:
            return num_tokens
        return num_tokens_within(request, num_tokens, step.scored_left)

    def _make_room(self, request: Request, num_new_tokens: int, view: SchedulerView, step: StepBuilder) -> bool:
        """Frees blocks behind the request until it can go on. False where it must itself wait."""
        while self.kv.num_blocks_to_continue(request, num_new_tokens) > self.kv.num_free_blocks:
            position = self.running.index(request)
            behind = self.running[position + 1 :]
            if not behind and position == 0:
                if not self.kv.pool.num_in_transit_blocks:
                    raise InvariantError("a request alone does not fit the pool it was accepted for")
                return False                                # a transfer still holds what it needs
            victim = self.policies.victim(view, behind) if behind else request
            self._preempt(victim, view, step)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, view: SchedulerView, step: StepBuilder) -> None:
        if self.policies.preemption(view, victim) is not Yield.RECOMPUTE:
            raise InvariantError("recompute is the only way to yield so far")
        num_lost_tokens = victim.num_computed_tokens
        self._counters.preempted(victim)
        num_freed_blocks = self.kv.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = RequestStatus.PREEMPTED
        self.running.remove(victim)
        self.waiting.push(victim, view)
        step.add_preempted(Preempted(victim.request_id, num_lost_tokens, num_freed_blocks))

    def _admit_waiting(self, view: SchedulerView, step: StepBuilder) -> None:
        is_gate_open = len(self.waiting) > 0 and self.policies.regime(view)
        while (request := self.waiting.head(view)) is not None:
            hit, step.refusal = self._decide(request, is_gate_open, view, step)
            if step.refusal is not None:
                return                                      # nobody passes the head: nobody starves
            self._start(request, hit, view)
            num_wanted = self._num_tokens_to_run(request, step)
            self._add_row(request, self.policies.chunking(view, num_wanted, step.budget_left, 0), step)
            request.first_scheduled_at = view.now if request.first_scheduled_at is None else request.first_scheduled_at

    def _decide(
        self, request: Request, is_gate_open: bool, view: SchedulerView, step: StepBuilder
    ) -> tuple[PrefixHit, Refusal | None]:
        """Whether the head of the queue may start. Reads only."""
        if not is_gate_open:
            return MISS, Refusal(request.request_id, "regime", needed=1, available=0)
        if len(self.running) >= self.config.max_num_seqs:
            return MISS, Refusal(request.request_id, "max_num_seqs", needed=1, available=0)
        if step.budget_left == 0:
            return MISS, Refusal(request.request_id, "max_num_batched_tokens", needed=1, available=0)
        if step.scored_left == 0 and has_unscored(request):
            return MISS, Refusal(request.request_id, "max_scored_tokens", needed=1, available=0)
        hit = MISS if has_unscored(request) else self.kv.look_up(request)
        return hit, self.policies.admission(view, request, hit)

    def _start(self, request: Request, hit: PrefixHit, view: SchedulerView) -> None:
        self.waiting.remove(request)
        self.kv.start(request, hit)
        if request.num_preemptions == 0:
            request.num_cached_tokens = hit.num_tokens
            self._counters.looked_up(request.num_tokens, hit.num_tokens)
        self._join_running(request, view)
        self._fork_if_due(request, view)

    def _add_row(self, request: Request, num_new_tokens: int, step: StepBuilder) -> None:
        for copy in self.kv.allocate(request, num_new_tokens):
            step.add_transfer(self._copies.begin(copy))
        start = request.num_computed_tokens
        is_sampled = start + num_new_tokens == request.num_tokens
        offsets = FIRST_OFFSET if num_new_tokens == 1 else (num_new_tokens - 1,)
        ref = self._sampling_refs[request.request_id]
        step.add_row(
            ScheduledRequest(
                request_id=request.request_id,
                num_computed_tokens=start,
                token_ids=request.token_ids(start, start + num_new_tokens),
                block_ids=request.block_tables,
                logits_offsets=offsets if is_sampled else (),
                sampling=ref if is_sampled else None,
                history=history_of(request) if is_sampled and ref.looks_back else None,
                scored=None if ref.is_plain else scored_by(request, num_new_tokens),
            )
        )

    # --- update

    def update(self, plan: SchedulerOutput, result: StepResult, now: float) -> list[RequestOutput]:
        """Takes in what the step in flight produced. The only place where observations change."""
        if plan is not self._in_flight or result.step_id != plan.step_id:
            raise InvariantError(f"a result of step {result.step_id} for a plan that is not in flight")
        self._in_flight = None
        for copy in self._copies.land(result):
            self.kv.copy_done(copy)
        outputs: list[RequestOutput] = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            request = self._requests.get(row.request_id)
            if request is not None:                         # else aborted in flight
                self._advance(request, row, row_result, now, outputs)
        for request in self._ended_in_flight:
            self.kv.free(request)
        self._ended_in_flight.clear()
        if self._choices.has_unborn:                        # after all ends: those who ended make place for children
            for request in tuple(self.running):
                self._fork_if_due(request, self._view(now))
        self._observe(plan, result)
        return outputs

    def _advance(
        self, request: Request, row: ScheduledRequest, result: RowResult, now: float, outputs: list[RequestOutput]
    ) -> None:
        if result.request_id != row.request_id:
            raise InvariantError(f"the row of {row.request_id} was answered as {result.request_id}")
        if result.failure is not None:
            self._fail(request, now, outputs)
            return
        start, end = row.num_computed_tokens, row.num_computed_tokens + len(row.token_ids)
        request.num_computed_tokens = end
        self.kv.computed(request)
        self._counters.computed(request, start, end)
        if row.sampling is None:
            outputs += news_of_scores(request, row, result)
            return
        if row.scored is not None:
            news_of_scores(request, row, result)            # what they are goes with the token
        num_taken, finish = append_tokens(request, result, self._finish_rules)
        self._counters.num_generation_tokens += num_taken
        request.first_token_at = now if request.first_token_at is None else request.first_token_at
        if finish is not None:
            self._end(request, finish, now)
            self.observations.num_finished += 1
            self.observations.num_finished_output_tokens += request.num_output_tokens
        outputs.append(output_of(request, result if finish is None else result.first(num_taken)))

    def _fail(self, request: Request, now: float, outputs: list[RequestOutput]) -> None:
        """The step gave this request no usable token. Choices that wait for its prompt fail with it; nobody else."""
        outputs += self._end_unborn(self._choices.unborn(request.request_id), FAILED, now)
        self.kv.distrust(request)
        self._end(request, FAILED, now)
        outputs.append(output_of(request))

    def _observe(self, plan: SchedulerOutput, result: StepResult) -> None:
        self._counters.num_steps += 1
        self.observations.num_steps += 1
        self.observations.num_step_tokens += plan.num_tokens
        self.observations.step_seconds += result.duration_seconds

    # --- one way in, one way out

    def _view(self, now: float) -> SchedulerView:
        return SchedulerView(self.waiting, self.running, self.kv, now, self.config, self.observations)

    def _refuse_taken_id(self, request_id: str) -> None:
        if request_id in self._requests or self._choices.is_reserved(request_id):
            raise RequestError(f"request_id: {request_id} is in use", param="request_id")

    def _accept(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._deadlines.watch(request)
        self._sampling_refs[request.request_id] = sampling_ref_of(request, self._finish_rules.eos_token_ids)

    def _join_running(self, request: Request, view: SchedulerView) -> None:
        request.status = RequestStatus.RUNNING

        def key(other: Request) -> OrderingKey:
            return self.policies.ordering.key(other, view)

        insort(self.running, request, key=key)

    def _fork_if_due(self, parent: Request, view: SchedulerView) -> None:
        """A parent at its last prompt token gets its choices; from here on they are requests like any other."""
        if self._choices.is_expecting(parent) and parent.num_computed_tokens == parent.num_prompt_tokens - 1:
            for child in self._choices.bear(parent):
                child.num_cached_tokens = parent.num_cached_tokens
                self._start_fork(parent, child, view)

    def _start_fork(self, parent: Request, child: Request, view: SchedulerView) -> None:
        self._accept(child)
        if len(self.running) >= self.config.max_num_seqs:
            self.waiting.push(child, view)                  # it will find its prompt in the prefix cache
            return
        self.kv.fork(parent, child)
        child.first_scheduled_at = view.now
        self._join_running(child, view)

    def _end(self, request: Request, finish: Finish, now: float) -> None:
        """The one removal for all ends."""
        del self._requests[request.request_id]
        del self._sampling_refs[request.request_id]
        is_running = request.status is RequestStatus.RUNNING
        if is_running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop, request.finished_at = finish.reason, finish.stop, now
        if is_running and self._in_flight is not None:
            self._ended_in_flight.append(request)
        else:
            self.kv.free(request)
        self.kv.forget(request)
        self._deadlines.forget(request)
        self._choices.ended(request)
        self._counters.ended(request)

    def _end_families(self, request_ids: Iterable[str], finish: Finish, now: float) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for request_id in request_ids:
            outputs += self._end_unborn((request_id, *self._choices.unborn(request_id)), finish, now)
            for living_id in (request_id, *self._choices.descendants(request_id)):
                request = self._requests.get(living_id)
                if request is not None:
                    self._end(request, finish, now)
                    outputs.append(output_of(request))
        return outputs

    def _end_unborn(self, child_ids: Iterable[str], finish: Finish, now: float) -> list[RequestOutput]:
        """Choices whose parent still computes the prompt: nothing to free, but their client waits for an end."""
        outputs: list[RequestOutput] = []
        for child_id in child_ids:
            cancelled = self._choices.cancel(child_id)
            if cancelled is not None:
                parent_id, index = cancelled
                outputs.append(ended_before_birth(self._requests[parent_id], child_id, index, finish.reason, now))
        return outputs

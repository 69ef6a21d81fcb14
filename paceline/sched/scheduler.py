"""Who runs in the next step, and what became of it. Owns every accepted request from add to its one end.

A step is schedule -> (an executor runs the plan) -> update. Policies answer, this file acts: decide, then commit.
  - Running requests stand in the ordering's order. One yields its blocks only to one ahead of it, so the first always
    progresses, and nobody already in this step's plan can become a victim.
  - Nobody is admitted in a step that was short of blocks, nor past a head of the queue that was refused.
  - A victim that keeps a part of its blocks waits with them, and loses them before anyone who runs loses one.
  - While a plan is in flight no block goes back to the pool: an abort then ends the request, update frees its blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from functools import partial

from ..config import SchedulerConfig
from ..errors import InvariantError, RequestError
from ..kv.manager import KVCacheManager
from ..kv.prefix_hash import PrefixHit
from ..request import FinishReason, Request, RequestStatus
from .batching import PASSING_LIMITS, Batch
from .books import check_queues
from .choices import Choices, choice_ids
from .counters import Counters
from .deadlines import Deadlines
from .ended import EndedRequests
from .finish import ABORTED, EXPIRED, FAILED, Finish, FinishRules, append_tokens
from .forecast import is_hopeless, refuse_infeasible
from .kept import KeptBlocks
from .ledger import Ledger
from .limits import Limits, check_fits, parent_of_fork
from .lookback import news_of_scores, num_tokens_within, sampling_ref_of
from .outputs import EngineStats, RequestOutput, ended_before_birth, output_of
from .plan import Preempted, Refusal, RowResult, SamplingRef, ScheduledRequest, SchedulerOutput, StepResult
from .policies import Policies
from .room import Room
from .start import decide, has_slot
from .step_builder import StepBuilder
from .switch import check_switch
from .transfers import CopiesUnderWay
from .view import Observations, SchedulerView
from .wait_queue import WaitQueue

PADDED_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


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
        self.ledger = Ledger(kv, self.running)
        self.waiting = WaitQueue(policies.ordering, self.ledger)
        self.observations = Observations()
        self._finish_rules = FinishRules(eos_token_ids, self.limits.max_model_len)
        self._requests: dict[str, Request] = {}             # every unfinished one
        self._sampling_refs: dict[str, SamplingRef] = {}
        self._choices = Choices()
        self._counters = Counters()
        self._in_flight: SchedulerOutput | None = None
        self._ended = EndedRequests(kv)
        self._copies = CopiesUnderWay()
        self._batch = Batch()
        self._kept = KeptBlocks(kv, self._counters)
        self._room = Room(self._ended, self._kept)
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
        for request_id in choice_ids(request):
            self._refuse_taken_id(request_id)
        view = self._view(request.arrival_time)
        refuse_infeasible(view, request, self.policies.ordering)
        self._choices.expect(request)
        self._accept(request)
        self.waiting.push(request, view)

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
        """Ends those whose deadline has come or cannot be kept any more, with all their choices."""
        outputs = self._end_families(self._deadlines.due(now), EXPIRED, now)
        if not self.policies.ordering.keeps_deadlines:
            return outputs
        view = self._view(now)
        while (head := self.waiting.head(view)) is not None and is_hopeless(view, head, self.policies.ordering):
            outputs += self._end_families((head.request_id,), EXPIRED, now)
        return outputs

    def idle_until(self, now: float) -> float | None:
        """Where nothing can run before some time unless a request arrives: that time. None: a step has work now, or
        there is none at all."""
        if self.running or not len(self.waiting):
            return None
        opens_at = min(self.policies.regime.opens_at(self._view(now)), self._deadlines.earliest)
        return opens_at if opens_at > now else None

    def output_token_ids(self, request_id: str) -> Sequence[int] | None:
        """What an unfinished request has generated so far; None for any other."""
        request = self._requests.get(request_id)
        return None if request is None else request.output_token_ids

    def switch_policies(self, policies: Policies, config: SchedulerConfig) -> None:
        """Swaps the whole bundle between two steps and puts all in the new order, or raises ConfigError."""
        check_switch(config, policies, self.kv.max_step_tokens, self.max_model_len)
        self.policies, self.config = policies, config
        view = self._view(0.0)
        self.waiting = self.waiting.reordered(policies.ordering, view)
        self.running.sort(key=lambda request: policies.ordering.running_key(request, view))

    def stats(self) -> EngineStats:
        return self._counters.stats(self.kv, self.observations.step_time.exported(), num_running=len(self.running),
                                    num_waiting=len(self.waiting))

    def check(self) -> None:
        """Raises InvariantError unless requests, queues and blocks agree. For tests and debugging."""
        self.kv.check((*self._requests.values(), *self._ended.in_flight, *self._ended.padding))
        check_queues(self._requests, self.running, self.waiting, self._kept.request_ids)
        self._ended.check(self.running)

    def schedule(self, now: float) -> SchedulerOutput:
        """The plan of the next step. Its update must come before the next schedule."""
        if self._in_flight is not None:
            raise InvariantError(f"step {self._in_flight.step_id} has not been updated")
        self.ledger.pass_time(now)
        view = self._view(now)
        chunking = self.policies.chunking
        step = StepBuilder(self._next_step_id, chunking.budget(view), self.kv, self._copies)
        if not self.running:
            self._batch.num_members, self._batch.is_open = 0, False
        self._drop_padding_of_past()
        if chunking.stalls_decode:
            self._continue_running(view, step, (r for r in self.running if self._num_tokens_to_run(r, step) > 1))
            self._admit_waiting(view, step)
        if not chunking.stalls_decode or not step.num_rows:
            self._continue_running(view, step, self.running)
        if not chunking.stalls_decode:
            self._admit_waiting(view, step)
        step.add_padding(self._ended.padding)
        self._next_step_id += 1
        self._in_flight = step.build(len(self.waiting), len(self.running), self.config.max_num_seqs)
        self.ledger.planned(self._in_flight, step.is_short_of_blocks)
        return self._in_flight

    def _continue_running(self, view: SchedulerView, step: StepBuilder, requests: Iterable[Request]) -> None:
        num_decodes_behind = sum(1 for request in self.running if request.num_uncomputed_tokens == 1)
        for request in tuple(requests):
            if request.status is not RequestStatus.RUNNING:
                continue                                    # became a victim earlier in this pass
            if step.budget_left == 0:
                break
            num_decodes_behind -= request.num_uncomputed_tokens == 1
            num_wanted = self._num_tokens_to_run(request, step)
            num_new_tokens = self.policies.chunking.share(view, num_wanted, step.budget_left, num_decodes_behind)
            if num_new_tokens and (self.kv.fits_on(request, num_new_tokens)
                                   or self._make_room(request, num_new_tokens, view, step)):
                step.add_row(request, self._sampling_refs[request.request_id], num_new_tokens)

    def _num_tokens_to_run(self, request: Request, step: StepBuilder) -> int:
        # A parent waits one token before the end of its prompt, where its choices part.
        num_tokens = request.num_uncomputed_tokens - self._choices.is_expecting(request)
        if request.sampling.prompt_logprobs is None:
            return num_tokens
        return num_tokens_within(request, num_tokens, step.scored_left)

    def _make_room(self, request: Request, num_new_tokens: int, view: SchedulerView, step: StepBuilder) -> bool:
        has_room = self._room.make(request, num_new_tokens, self.policies, view, partial(self._preempt, view, step))
        step.is_short_of_blocks |= not has_room
        return has_room

    def _preempt(self, view: SchedulerView, step: StepBuilder, victim: Request, num_missing: int | None) -> None:
        """Takes the victim's last blocks as far as they are missing; None: all of them."""
        num_computed_tokens = victim.num_computed_tokens
        num_freed_blocks = self._kept.shrink(victim, num_missing)
        victim.num_preemptions += 1
        victim.status = RequestStatus.PREEMPTED
        self.running.remove(victim)
        self.waiting.push(victim, view)
        self._counters.num_preemptions += 1
        num_lost_tokens = num_computed_tokens - victim.num_computed_tokens
        step.add_preempted(Preempted(victim.request_id, num_lost_tokens, num_freed_blocks))

    def _admit_waiting(self, view: SchedulerView, step: StepBuilder) -> None:
        if step.is_short_of_blocks or (request := self.waiting.head(view)) is None:
            return                                          # short of blocks: admitting now would thrash
        if self.policies.regime.may_join(view):
            step.refusal = self.policies.gate(view, request)
        else:
            step.refusal = Refusal(request.request_id, "regime", needed=1, available=0)
        if step.refusal is None:
            self._start_while_allowed(view, step)
            self._batch.is_open = step.refusal is not None and step.refusal.limit in PASSING_LIMITS

    def _start_while_allowed(self, view: SchedulerView, step: StepBuilder) -> None:
        while (request := self.waiting.head(view)) is not None:
            hit, step.refusal = decide(request, self._choices.is_expecting(request), self.policies, view, step)
            if step.refusal is not None:
                if self._kept.make_way(request, step.refusal, self.policies.ordering, view):
                    continue
                return                                      # nobody passes the head: nobody starves
            step.num_started += 1
            self._start(request, hit, view)
            num_wanted = self._num_tokens_to_run(request, step)
            num_new_tokens = self.policies.chunking.share(view, num_wanted, step.budget_left, 0)
            step.add_row(request, self._sampling_refs[request.request_id], num_new_tokens)
            request.first_scheduled_at = view.now if request.first_scheduled_at is None else request.first_scheduled_at

    def _start(self, request: Request, hit: PrefixHit, view: SchedulerView) -> None:
        self.waiting.remove(request)
        self.kv.start(request, hit)
        self._kept.forget(request)
        if request.num_preemptions == 0:
            request.num_cached_tokens = hit.num_tokens
            self._counters.looked_up(request.num_tokens, hit.num_tokens)
        self._join_running(request, view)
        self._fork_if_due(request, view)

    def _drop_padding_of_past(self) -> None:
        if not (self.running and self.policies.regime.is_padded):
            self._ended.stop_padding(is_in_flight=self._in_flight is not None)

    def update(self, plan: SchedulerOutput, result: StepResult, now: float) -> list[RequestOutput]:
        """Takes in what the step in flight produced. The only place where observations change."""
        if plan is not self._in_flight or result.step_id != plan.step_id:
            raise InvariantError(f"a result of step {result.step_id} for a plan that is not in flight")
        self.ledger.pass_time(now)
        self._in_flight = None
        for copy in self._copies.land(result):
            self.kv.copy_done(copy)
        outputs: list[RequestOutput] = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            request = self._requests.get(row.request_id)
            if request is not None:                         # else aborted in flight
                self._advance(request, row, row_result, now, outputs)
        self._ended.landed()
        if self._choices.has_unborn:                        # after all ends: those who ended make place for children
            for request in tuple(self.running):
                self._fork_if_due(request, self._view(now))
        self._drop_padding_of_past()
        self._counters.step_ran(plan, self.config.max_num_seqs)
        self.observations.note_step(plan, result, now, goes_on=bool(self.running))
        self.observations.service.settle(self._least_served(), self.running)
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
        num_input_tokens = self._counters.computed(request, start, end)
        if row.sampling is None:
            self.observations.service.charge(request, num_input_tokens, 0, self.config)
            outputs += news_of_scores(request, row, result)
            return
        if row.scored is not None:
            news_of_scores(request, row, result)            # what they are goes with the token
        num_taken, finish = append_tokens(request, result, self._finish_rules)
        self._counters.num_generation_tokens += num_taken
        self.observations.service.charge(request, num_input_tokens, num_taken, self.config)
        request.first_token_at = now if request.first_token_at is None else request.first_token_at
        if finish is not None:
            self._end(request, finish, now)
            self.observations.note_end(request)
        outputs.append(output_of(request, result if finish is None else result.first(num_taken)))

    def _least_served(self) -> str | None:
        head = self.waiting.head(self._view(0.0)) if self.policies.ordering.lanes is not None else None
        return None if head is None else head.tenant

    def _fail(self, request: Request, now: float, outputs: list[RequestOutput]) -> None:
        """The step gave this request no usable token. Choices that wait for its prompt fail with it; nobody else."""
        self.kv.distrust(request)
        outputs += self._end_unborn(self._choices.unborn(request.request_id), FAILED, now)
        self._end(request, FAILED, now)
        outputs.append(output_of(request))

    # --- one way in, one way out

    def _view(self, now: float) -> SchedulerView:
        return SchedulerView(self.waiting, self.running, self.kv, now, self.config, self.observations,
                             self.limits.max_model_len, self._batch)

    def _refuse_taken_id(self, request_id: str) -> None:
        if request_id in self._requests or self._choices.is_reserved(request_id):
            raise RequestError(f"request_id: {request_id} is in use", param="request_id")

    def _accept(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._deadlines.watch(request)
        self._sampling_refs[request.request_id] = sampling_ref_of(request, self._finish_rules.eos_token_ids)

    def _join_running(self, request: Request, view: SchedulerView) -> None:
        request.status = RequestStatus.RUNNING
        self._batch.num_members += 1
        insort(self.running, request, key=lambda other: self.policies.ordering.running_key(other, view))

    def _fork_if_due(self, parent: Request, view: SchedulerView) -> None:
        """A parent at its last prompt token gets its choices; from here on they are requests like any other."""
        if self._choices.is_expecting(parent) and parent.num_computed_tokens == parent.num_prompt_tokens - 1:
            for child in self._choices.bear(parent):
                child.num_cached_tokens = parent.num_cached_tokens
                self._start_fork(parent, child, view)

    def _start_fork(self, parent: Request, child: Request, view: SchedulerView) -> None:
        self._accept(child)
        if not has_slot(self.policies, view) or self.policies.admission(view, child, self.kv.shared_by_fork(parent)):
            self.waiting.push(child, view)                  # it will find its prompt in the prefix cache
            return
        self.kv.fork(parent, child)
        child.first_scheduled_at = view.now
        self._join_running(child, view)

    def _end(self, request: Request, finish: Finish, now: float) -> None:
        """The one removal for all ends."""
        del self._requests[request.request_id], self._sampling_refs[request.request_id]
        is_running = request.status is RequestStatus.RUNNING
        if is_running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop, request.finished_at = finish.reason, finish.stop, now
        if self._in_flight is not None:
            self._ended.in_flight.append(request)
        elif is_running and self.policies.regime.is_padded and finish.reason in PADDED_ENDS:
            self._ended.padding.append(request)
        else:
            self.kv.free(request)
        self._kept.forget(request)
        self.kv.forget(request)
        self._deadlines.forget(request)
        self._choices.ended(request)
        self._counters.ended(request)
        self.ledger.ended.note(request, now)

    def _end_families(self, request_ids: Iterable[str], finish: Finish, now: float) -> list[RequestOutput]:
        self.ledger.pass_time(now)
        outputs: list[RequestOutput] = []
        for request_id in request_ids:
            outputs += self._end_unborn((request_id, *self._choices.unborn(request_id)), finish, now)
            for living_id in (request_id, *self._choices.descendants(request_id)):
                request = self._requests.get(living_id)
                if request is not None:
                    self._end(request, finish, now)
                    outputs.append(output_of(request))
        self._drop_padding_of_past()
        return outputs

    def _end_unborn(self, child_ids: Iterable[str], finish: Finish, now: float) -> list[RequestOutput]:
        """Choices whose parent still computes the prompt: nothing to free, but their client waits for an end."""
        return [ended_before_birth(self._requests[parent_id], child_id, index, finish.reason, now)
                for parent_id, child_id, index in self._choices.cancel_unborn(child_ids)]

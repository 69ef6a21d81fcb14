"""One engine step: schedule, execute, update, tell. Owns nothing but their order; pure but for what is handed in.

A row that failed is a value in the result and ends its own request. Whatever the executor raises goes up untouched and
leaves the plan in flight: the loop around decides that the engine is dead and tells every stream. There is no half step
to go back to. The clock is imported as a type only, since its module reads the wall clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ..config import SchedulerConfig
from ..errors import ConfigError, RequestError, field_of
from ..request import Request
from ..sched.outputs import EngineStats, RequestOutput
from ..sched.plan import Executor, SchedulerOutput, StepResult
from ..sched.policies import Policies
from ..sched.reports import reports_of
from ..sched.scheduler import Scheduler
from .events import EngineEvents, StepRecord
from .messages import (
    Answer,
    AskPolicy,
    AskRequests,
    Outputs,
    PolicyState,
    Question,
    RequestReports,
    Submit,
    Switched,
    SwitchPolicy,
)

if TYPE_CHECKING:
    from ..clock import Clock

# Marks rows whose text reached a stop string: sets RowResult.stop and cuts its tokens after the match.
FindStops: TypeAlias = Callable[[SchedulerOutput, StepResult], StepResult]


class PolicyBook(Protocol):
    """Knows policies and presets by name."""

    def resolve(self, asked: SwitchPolicy, current: SchedulerConfig) -> tuple[SchedulerConfig, Policies]:
        """What to switch to. Raises ConfigError where it cannot be, beginning with the field."""
        ...

    def describe(self, config: SchedulerConfig) -> PolicyState: ...


class EngineCore:
    """The loop's body. add and abort between steps, step while has_work."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        events: EngineEvents,
        find_stops: FindStops | None = None,
        policy_book: PolicyBook | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.events = events
        self._find_stops = find_stops
        self._policy_book = policy_book
        self._ended_between_steps: list[RequestOutput] = []    # the next Outputs brings them

    def add(self, submit: Submit) -> None:
        """Accepts a request or raises RequestError, changing nothing."""
        now = self.clock.now()
        try:
            self.scheduler.add(request_of(submit))
        except RequestError as error:
            refusal = error    # the name `error` ends with this block
            self.events.record(lambda recorder: recorder.on_refused(submit, now, refusal))
            raise
        self.events.record(lambda recorder: recorder.on_added(submit, now))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these and all their choices; their last outputs come with the next step."""
        named, now = tuple(request_ids), self.clock.now()
        outputs = self.scheduler.abort(named, now)
        self.events.record(lambda recorder: recorder.on_aborted(named, now, tuple(outputs)))
        self._note_ends(outputs)

    def answer(self, question: Question) -> Answer:
        """Between steps. Raises RequestError, changing nothing, where what was asked for cannot be."""
        if isinstance(question, AskRequests):
            return RequestReports(reports_of(self.scheduler, question.request_ids, self.clock.now()))
        if self._policy_book is None:
            raise RequestError("policy: this engine knows no policies by name")
        old = self.scheduler.config
        if isinstance(question, AskPolicy):
            return self._policy_book.describe(old)
        try:
            config, policies = self._policy_book.resolve(question, old)
            self.scheduler.switch_policies(policies, config)
        except ConfigError as error:
            raise RequestError(str(error), field_of(error)) from error
        now = self.clock.now()
        self.events.record(lambda recorder: recorder.on_switched(config, now))
        return Switched(self._policy_book.describe(old), self._policy_book.describe(config))

    def has_work(self) -> bool:
        """Whether a step would run something or bring news."""
        return self.scheduler.has_work() or bool(self._ended_between_steps)

    def seconds_until_work(self) -> float | None:
        """How long to wait for messages before the next step: 0 where there is work, None where there is none at all.

        In between: the regime waits for a batch to fill.
        """
        if not self.has_work():
            return None
        if self._ended_between_steps:
            return 0.0
        now = self.clock.now()
        idle_until = self.scheduler.idle_until(now)
        return 0.0 if idle_until is None else idle_until - now

    def step(self) -> Outputs:
        """Runs one step, or only delivers news when there is nothing to run now."""
        now = self.clock.now()
        if expired := self.scheduler.expire(now):
            self.events.record(lambda recorder: recorder.on_expired(now, tuple(expired)))
            self._note_ends(expired)
        if not self.scheduler.has_work() or self.scheduler.idle_until(now) is not None:
            return self._outputs(self._take_news(), self.scheduler.stats())
        plan = self.scheduler.schedule(now)
        self.events.record(lambda recorder: recorder.on_planned(plan, now))
        result = self.executor.collect(self.executor.submit(plan))
        if self._find_stops is not None:
            result = self._find_stops(plan, result)
        updated_at = self.clock.now()
        outputs = self.scheduler.update(plan, result, updated_at)
        stats = self.scheduler.stats()
        step = StepRecord(plan, result, tuple(outputs), stats, now, updated_at)
        self.events.step_done(plan, result)
        self.events.record(lambda recorder: recorder.on_landed(step))
        self._tell_finished(outputs)
        news = (*self._take_news(), *outputs)
        return self._outputs(news, stats, plan.num_tokens, result.duration_seconds)

    def _outputs(
        self, news: tuple[RequestOutput, ...], stats: EngineStats, num_tokens: int = 0, duration_seconds: float = 0.0
    ) -> Outputs:
        totals = self.scheduler.ledger.totals_if_due(is_idle=not self.scheduler.has_work())
        return Outputs(news, stats, num_tokens, duration_seconds, totals)

    def _note_ends(self, outputs: list[RequestOutput]) -> None:
        """Ends that no step brought."""
        self._ended_between_steps += outputs
        self._tell_finished(outputs)

    def _take_news(self) -> tuple[RequestOutput, ...]:
        news = tuple(self._ended_between_steps)
        self._ended_between_steps.clear()
        return news

    def _tell_finished(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self.events.request_finished(output)


def request_of(submit: Submit) -> Request:
    """The message as the scheduler's own, mutable request."""
    return Request(
        request_id=submit.request_id,
        prompt_token_ids=submit.prompt_token_ids,
        sampling=submit.sampling,
        arrival_time=submit.arrival_time,
        tenant=submit.tenant,
        priority=submit.priority,
        deadline=submit.deadline,
        cache_extras=submit.cache_extras,
        prompt_index=submit.prompt_index,
        num_choices=submit.num_choices,
        program_id=submit.program_id,
    )

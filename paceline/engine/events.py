"""Fan-out to listeners. They never alter behaviour: one that raises is removed and reported.

A Listener sees what steps did. A Recorder also sees everything that goes into the scheduler, in order, with every `now`
it was handed: enough to feed it back. With none attached a step costs empty loops; no string is formatted here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..config import SchedulerConfig
from ..errors import InvariantError, RequestError
from ..sched.outputs import EngineStats, RequestOutput
from ..sched.plan import SchedulerOutput, StepResult
from .messages import Submit


class Listener(Protocol):
    """Sees frozen values only."""

    def on_step(self, plan: SchedulerOutput, result: StepResult) -> None: ...

    def on_request_finished(self, output: RequestOutput) -> None: ...


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that has landed: what was planned, what came of it, when. Times in seconds on the engine's clock."""

    plan: SchedulerOutput
    result: StepResult
    outputs: tuple[RequestOutput, ...]    # the news that update made of the result
    stats: EngineStats                    # after the step
    planned_at: float                     # the `now` of schedule
    updated_at: float                     # the `now` of update


class Recorder(Protocol):
    """Sees every input of the scheduler and every answer; frozen values only."""

    def on_added(self, submit: Submit, now: float) -> None: ...

    def on_refused(self, submit: Submit, now: float, error: RequestError) -> None:
        """The scheduler refused it; nothing has changed."""
        ...

    def on_aborted(self, request_ids: tuple[str, ...], now: float, outputs: tuple[RequestOutput, ...]) -> None:
        """These were named; outputs are the ends that it brought."""
        ...

    def on_expired(self, now: float, outputs: tuple[RequestOutput, ...]) -> None:
        """Deadlines have come, and ended these."""
        ...

    def on_forked(self, parent_id: str, child: Submit, now: float) -> None: ...

    def on_switched(self, config: SchedulerConfig, now: float) -> None:
        """From here on the scheduler runs by these policies."""
        ...

    def on_planned(self, plan: SchedulerOutput, now: float) -> None: ...

    def on_landed(self, step: StepRecord) -> None: ...


AnyListener: TypeAlias = Listener | Recorder
Report: TypeAlias = Callable[[AnyListener, Exception], None]    # told of a listener that was removed, and why


class EngineEvents:
    """The engine's listeners, called in order of attachment."""

    def __init__(self, report: Report, listeners: tuple[Listener, ...] = ()) -> None:
        self._report = report
        self.listeners = listeners
        self.recorders: tuple[Recorder, ...] = ()

    def attach(self, listener: Listener) -> None:
        self.listeners = (*self.listeners, listener)

    def attach_recorder(self, recorder: Recorder) -> None:
        self.recorders = (*self.recorders, recorder)

    def detach(self, listener: AnyListener) -> None:
        self.listeners = tuple(other for other in self.listeners if other is not listener)
        self.recorders = tuple(other for other in self.recorders if other is not listener)

    def record(self, tell: Callable[[Recorder], None]) -> None:
        """Tells every recorder of one input or answer of the scheduler: `tell` calls one of Recorder's methods."""
        for recorder in self.recorders:
            self._tell(recorder, lambda: tell(recorder))    # noqa: B023

    def step_done(self, plan: SchedulerOutput, result: StepResult) -> None:
        for listener in self.listeners:
            self._tell(listener, lambda: listener.on_step(plan, result))    # noqa: B023 called before the loop goes on

    def request_finished(self, output: RequestOutput) -> None:
        for listener in self.listeners:
            self._tell(listener, lambda: listener.on_request_finished(output))    # noqa: B023

    def _tell(self, listener: AnyListener, call: Callable[[], None]) -> None:
        try:
            call()
        except InvariantError:
            raise                   # a listener that checks the engine has found a bug in it: stop loudly
        except Exception as error:
            self.detach(listener)
            self._report(listener, error)

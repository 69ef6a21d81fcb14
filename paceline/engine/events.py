"""Fan-out to listeners. They never alter behaviour: one that raises is removed and reported.

With none attached a step costs one empty loop; no string is formatted here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from ..errors import InvariantError
from ..sched.outputs import RequestOutput
from ..sched.plan import SchedulerOutput, StepResult


class Listener(Protocol):
    """Sees frozen values only."""

    def on_step(self, plan: SchedulerOutput, result: StepResult) -> None: ...

    def on_request_finished(self, output: RequestOutput) -> None: ...


Report: TypeAlias = Callable[[Listener, Exception], None]    # told of a listener that was removed, and why


class EngineEvents:
    """The engine's listeners, called in order of attachment."""

    def __init__(self, report: Report, listeners: tuple[Listener, ...] = ()) -> None:
        self._report = report
        self.listeners = listeners

    def attach(self, listener: Listener) -> None:
        self.listeners = (*self.listeners, listener)

    def detach(self, listener: Listener) -> None:
        self.listeners = tuple(other for other in self.listeners if other is not listener)

    def step_done(self, plan: SchedulerOutput, result: StepResult) -> None:
        for listener in self.listeners:
            self._tell(listener, lambda: listener.on_step(plan, result))    # noqa: B023 called before the loop goes on

    def request_finished(self, output: RequestOutput) -> None:
        for listener in self.listeners:
            self._tell(listener, lambda: listener.on_request_finished(output))    # noqa: B023

    def _tell(self, listener: Listener, call: Callable[[], None]) -> None:
        try:
            call()
        except InvariantError:
            raise                   # a listener that checks the engine has found a bug in it: stop loudly
        except Exception as error:
            self.detach(listener)
            self._report(listener, error)

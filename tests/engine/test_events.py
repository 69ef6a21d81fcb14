"""Listeners see everything and change nothing."""

from __future__ import annotations

import pytest

from paceline.engine.events import EngineEvents
from paceline.errors import InvariantError
from paceline.sched.plan import SchedulerOutput, StepResult

PLAN, RESULT = SchedulerOutput(0, ()), StepResult(0, ())


class Counting:
    def __init__(self) -> None:
        self.num_calls = 0

    def on_step(self, plan: SchedulerOutput, result: StepResult) -> None:
        self.num_calls += 1

    def on_request_finished(self, output) -> None:
        self.num_calls += 1


class Raising(Counting):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def on_step(self, plan: SchedulerOutput, result: StepResult) -> None:
        super().on_step(plan, result)
        raise self.error


def test_a_listener_that_raises_is_removed_and_reported_and_the_others_go_on() -> None:
    reports: list[tuple] = []
    before, broken, after = Counting(), Raising(ValueError("oops")), Counting()
    events = EngineEvents(lambda *report: reports.append(report), (before, broken, after))
    events.step_done(PLAN, RESULT)
    events.step_done(PLAN, RESULT)
    assert (before.num_calls, broken.num_calls, after.num_calls) == (2, 1, 2)
    assert reports == [(broken, broken.error)]


def test_a_listener_that_finds_a_bug_of_ours_stops_the_engine() -> None:
    events = EngineEvents(lambda *report: None, (Raising(InvariantError("books")),))
    with pytest.raises(InvariantError):
        events.step_done(PLAN, RESULT)


def test_listeners_come_and_go() -> None:
    listener = Counting()
    events = EngineEvents(lambda *report: None)
    events.attach(listener)
    events.request_finished(None)
    events.detach(listener)
    events.request_finished(None)
    assert listener.num_calls == 1

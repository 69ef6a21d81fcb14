"""A request whose deadline has come ends before the next step, wherever it stands; nobody else notices."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.request import FinishReason
from paceline.sched.deadlines import Deadlines

from ..fakes import Setup, Stage, make_request, solo

SMALL = Setup(num_blocks=12, max_num_seqs=2)


def expire(stage: Stage, now: float) -> list[str]:
    outputs = stage.scheduler.expire(now)
    stage.note(outputs)
    stage.scheduler.check()
    return [output.request_id for output in outputs]


def test_running_waiting_and_preempted_requests_end_at_their_deadline() -> None:
    stage = Stage(SMALL)
    stage.add(make_request("calm", 9, 9), *(make_request(f"r{i}", 9, 20, salt=i, deadline=50.0 + i) for i in range(4)))
    for _ in range(6):
        stage.step()
    assert expire(stage, 49.9) == []
    assert expire(stage, 52.0) == ["r0", "r1", "r2"]
    assert {stage.finished[name].finish_reason for name in ("r0", "r1", "r2")} == {FinishReason.TIMEOUT}
    stage.run()
    assert stage.reasons["calm"] is stage.reasons["r3"] is FinishReason.LENGTH
    assert stage.tokens["calm"] == solo(make_request("x", 9, 9), SMALL)
    assert stage.scheduler.stats().num_free_blocks == SMALL.num_blocks


def test_choices_end_with_their_prompt_born_or_not() -> None:
    stage = Stage(Setup(max_num_batched_tokens=4))
    stage.add(make_request("a", 20, 5, num_choices=3, deadline=1.0),
              make_request("b", 2, 50, num_choices=2, deadline=9.0))
    stage.step()
    assert sorted(expire(stage, 2.0)) == ["a", "a:1", "a:2"]
    for _ in range(4):
        stage.step()
    assert sorted(expire(stage, 9.0)) == ["b", "b:1"]
    assert not stage.scheduler.has_work()
    assert stage.scheduler.stats().num_free_blocks == stage.setup.num_blocks


def test_who_has_ended_has_no_deadline_any_more() -> None:
    stage = Stage(SMALL)
    stage.add(make_request("a", 3, 2, deadline=100.0))
    stage.run()
    assert not stage.scheduler._deadlines._deadlines
    stage.finished.clear()
    stage.add(make_request("a", 3, 50))    # the same id, now without
    stage.step()
    assert expire(stage, 200.0) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), st.lists(st.integers(0, 10), max_size=6))
def test_exactly_those_due_come_up_the_earliest_first(requests: list[tuple[int, bool]], looks: list[int]) -> None:
    deadlines, living = Deadlines(), {}
    for number, (deadline, leaves) in enumerate(requests):
        request = make_request(f"r{number:02}", deadline=float(deadline))
        deadlines.watch(request)
        living[request.request_id] = float(deadline)
        if leaves:
            deadlines.forget(request)
            del living[request.request_id]
    for now in sorted(looks):
        due = sorted((at, name) for name, at in living.items() if at <= now)
        assert deadlines.due(now) == [name for _, name in due]
        for _, name in due:
            deadlines.forget(make_request(name))
            del living[name]

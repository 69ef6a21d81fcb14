"""The loop's body: messages in, outputs out, listeners told, failures left standing."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from paceline.clock import VirtualClock
from paceline.engine.core import EngineCore, request_of
from paceline.engine.events import EngineEvents
from paceline.engine.messages import Outputs, Submit
from paceline.errors import PromptTooLong
from paceline.request import FinishReason, Request, SamplingParams, StopMatch
from paceline.sched.plan import SchedulerOutput, StepResult

from ..fakes import Setup, Stage, make_request, solo


def submit(request_id: str, num_prompt_tokens: int = 5, max_tokens: int = 4, **extra) -> Submit:
    request = make_request(request_id, num_prompt_tokens)
    return Submit(request_id=request_id, prompt_token_ids=request.prompt_token_ids, arrival_time=0.0,
                  sampling=SamplingParams(max_tokens=max_tokens), **extra)


class Recorder:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ended: list[str] = []

    def on_step(self, plan: SchedulerOutput, result: StepResult) -> None:
        self.steps.append(plan.step_id)

    def on_request_finished(self, output) -> None:
        self.ended.append(output.request_id)


def make_core(find_stops=None, **setup) -> tuple[EngineCore, Recorder]:
    stage, recorder = Stage(Setup(**setup)), Recorder()

    def report(listener, error) -> None:
        raise AssertionError("no listener should fail here") from error

    events = EngineEvents(report, (recorder,))
    return EngineCore(stage.scheduler, stage.executor, VirtualClock(), events, find_stops), recorder


def drain(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, FinishReason | None]]:
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason | None] = {}
    while core.has_work():
        news = core.step()
        assert isinstance(news, Outputs)
        for output in news.outputs:
            assert output.request_id not in reasons
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    return tokens, reasons


def test_a_submitted_request_runs_to_its_end() -> None:
    core, recorder = make_core()
    core.add(submit("a"))
    core.add(submit("b", num_choices=2))
    tokens, reasons = drain(core)
    assert tokens["a"] == solo(make_request("a", 5, 4), Setup())
    assert reasons == dict.fromkeys(("a", "b", "b:1"), FinishReason.LENGTH)
    assert sorted(recorder.ended) == ["a", "b", "b:1"]
    assert recorder.steps == list(range(len(recorder.steps)))


def test_outputs_carry_the_step_and_the_gauges() -> None:
    core, _ = make_core()
    core.add(submit("a", 7))
    news = core.step()
    assert (news.step_num_tokens, news.step_duration_seconds) == (7, 0.01)
    assert (news.stats.num_running, news.stats.num_generation_tokens) == (1, 1)
    assert news.outputs[0].num_prompt_tokens == 7


def test_an_abort_is_news_even_when_nothing_is_left_to_run() -> None:
    core, recorder = make_core()
    core.add(submit("a"))
    core.step()
    core.abort(("a", "stranger"))
    assert core.has_work()
    news = core.step()
    assert [(output.request_id, output.finish_reason) for output in news.outputs] == [("a", FinishReason.ABORT)]
    assert news.step_num_tokens == 0
    assert not core.has_work()
    assert len(recorder.steps) == 1
    assert recorder.ended == ["a"]


def test_a_deadline_is_looked_at_before_each_step() -> None:
    core, recorder = make_core()
    core.add(submit("a", max_tokens=50, deadline=5.0))
    core.add(submit("b", max_tokens=50, deadline=7.0))
    core.step()
    clock = core.clock
    assert isinstance(clock, VirtualClock)
    clock.advance(5.0)
    news = core.step()
    assert [(output.request_id, output.finish_reason) for output in news.outputs] == [
        ("a", FinishReason.TIMEOUT), ("b", None)]
    clock.advance(5.0)
    news = core.step()    # nothing is left to run
    assert [output.finish_reason for output in news.outputs] == [FinishReason.TIMEOUT] and news.step_num_tokens == 0
    assert recorder.ended == ["a", "b"] and not core.has_work()


def test_a_bad_request_is_refused_before_anything_moves() -> None:
    core, _ = make_core(num_blocks=10, block_size=4)
    with pytest.raises(PromptTooLong):
        core.add(submit("a", 40))
    assert not core.has_work()


def test_every_field_of_a_submit_reaches_the_request() -> None:
    message = submit("a", tenant="t", priority=3, deadline=9.0, cache_extras=("x",), prompt_index=2, num_choices=4,
                     program_id="p")
    request = request_of(message)
    assert {f.name: getattr(request, f.name) for f in fields(Submit)} == {
        f.name: getattr(message, f.name) for f in fields(Submit)}


def test_a_stop_string_ends_the_request_with_no_token_past_it() -> None:
    def stop_second(plan: SchedulerOutput, result: StepResult) -> StepResult:
        counted = [replace(row, stop=StopMatch(text="x", num_text_chars=1)) if plan.step_id == 1 else row
                   for row in result.rows]
        return replace(result, rows=tuple(counted))

    core, _ = make_core(stop_second)
    core.add(submit("a", max_tokens=9))
    tokens, reasons = drain(core)
    assert len(tokens["a"]) == 2
    assert reasons == {"a": FinishReason.STOP}
    assert core.scheduler.stats().num_generation_tokens == 2


def test_what_the_executor_raises_comes_through_and_loses_no_news() -> None:
    core, recorder = make_core()
    core.add(submit("a"))
    core.add(submit("b"))
    core.step()
    core.abort(("b",))
    core.executor.collect = lambda ticket: 1 / 0
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert core.has_work()
    assert len(recorder.steps) == 1
    assert [output.request_id for output in core._ended_between_steps] == ["b"]


class Unprintable(Request):
    """Makes eager formatting in the step loop a test failure instead of a slow day (vLLM #4261)."""

    def __repr__(self) -> str:
        raise AssertionError("the step loop formatted a request")

    __str__ = __repr__


def test_the_step_loop_formats_no_request() -> None:
    core, _ = make_core(num_blocks=14, max_num_batched_tokens=16)
    for i in range(6):
        made = make_request(f"r{i}", 5 + 3 * i, 12, salt=i, arrival_time=float(i), num_choices=1 + i % 2)
        core.scheduler.add(Unprintable(**{f.name: getattr(made, f.name) for f in fields(Request)}))
    core.step()
    core.abort(("r2",))
    drain(core)
    assert core.scheduler.stats().num_preemptions > 0


def test_plans_can_be_printed_hashed_and_compared() -> None:
    def plans() -> list[SchedulerOutput]:
        stage = Stage(Setup(num_blocks=14))
        stage.add(*(make_request(f"r{i}", 5 + i, 9, salt=i, num_choices=2) for i in range(4)))
        return stage.run().plans

    first, second = plans(), plans()
    assert first == second
    assert [hash(plan) for plan in first] == [hash(plan) for plan in second]
    assert "COPY" in repr(first)


def test_dropping_the_executors_caches_between_steps_changes_nothing() -> None:
    def tokens(is_forgetful: bool) -> dict[str, list[int]]:
        stage = Stage(Setup(num_blocks=14, max_num_batched_tokens=9))
        stage.add(*(make_request(f"r{i}", 5 + 3 * i, 9, salt=i % 2, num_choices=1 + i % 3) for i in range(4)))
        while stage.scheduler.has_work():
            stage.step()
            if is_forgetful:
                stage.executor.drop_caches()
        return stage.tokens

    assert tokens(is_forgetful=True) == tokens(is_forgetful=False)

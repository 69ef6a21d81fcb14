"""Who can be served at all, and where generation ends."""

from __future__ import annotations

import pytest

from paceline.errors import PromptTooLong, RequestError
from paceline.request import FinishReason, StopMatch
from paceline.sched.limits import Limits, check_fits
from paceline.sched.plan import RowResult, StepResult

from ..fakes import EOS, Setup, Stage, make_request, solo


def test_max_tokens_is_lowered_to_what_the_context_leaves() -> None:
    limits = Limits(max_model_len=100)
    assert check_fits(90, 5, limits) == 5
    assert check_fits(90, 50, limits) == 10
    assert check_fits(90, None, limits) == 10
    assert check_fits(99, 50, limits) == 1


def test_strictness_refuses_what_would_be_lowered() -> None:
    assert check_fits(90, 10, Limits(100), is_strict=True) == 10
    with pytest.raises(RequestError) as caught:
        check_fits(90, 11, Limits(100), is_strict=True)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("num_prompt_tokens", [100, 101, 5000])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(num_prompt_tokens: int) -> None:
    with pytest.raises(PromptTooLong, match=f"{num_prompt_tokens}.*100"):
        check_fits(num_prompt_tokens, 1, Limits(100))


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(0, 4), (5, 0), (5, -1)])
def test_nothing_to_read_or_to_write_is_refused(num_prompt_tokens: int, max_tokens: int) -> None:
    with pytest.raises(RequestError):
        check_fits(num_prompt_tokens, max_tokens, Limits(100))


def test_a_pool_smaller_than_the_context_lowers_the_limit() -> None:
    assert Stage(Setup(num_blocks=64, block_size=4, max_model_len=4096)).scheduler.limits == Limits(256)
    assert Stage(Setup(num_blocks=64, block_size=4, max_model_len=128)).scheduler.limits == Limits(128)


def test_what_can_never_fit_is_refused_at_once_and_others_proceed() -> None:
    stage = Stage(Setup(num_blocks=10, block_size=4, max_model_len=200))
    assert stage.scheduler.max_model_len == 40
    with pytest.raises(PromptTooLong):
        stage.add(make_request("heavy", 40))
    assert not stage.scheduler.has_work()
    stage.add(make_request("light", 39), make_request("lighter", 5))
    assert set(stage.run().finished) == {"light", "lighter"}


@pytest.mark.parametrize(("num_left", "max_tokens"), [(3, 10), (1, 10), (1, 1), (5, 4)])
def test_close_to_the_context_limit(num_left: int, max_tokens: int) -> None:
    stage = Stage(Setup(max_model_len=40))
    stage.add(make_request("a", 40 - num_left, max_tokens))
    stage.run()
    assert len(stage.tokens["a"]) == min(num_left, max_tokens)
    assert stage.reasons["a"] is FinishReason.LENGTH


def test_the_whole_pool_serves_one_request_whatever_the_watermark() -> None:
    stage = Stage(Setup(num_blocks=10, block_size=4, watermark=0.5))
    stage.add(make_request("a", 38, 50))
    stage.run()
    assert len(stage.tokens["a"]) == 2


def test_one_token_each_for_many_at_once() -> None:
    setup = Setup(max_num_batched_tokens=32)
    stage = Stage(setup)
    requests = [make_request(f"r{i:02}", 1 + i % 9, max_tokens=1, salt=i) for i in range(64)]
    stage.add(*requests)
    stage.run()
    assert {len(tokens) for tokens in stage.tokens.values()} == {1}
    assert set(stage.reasons.values()) == {FinishReason.LENGTH}
    assert stage.tokens == {request.request_id: solo(request, setup) for request in requests}


def tokens_of(request_id: str = "a", eos: frozenset[int] = frozenset(), **fields) -> tuple[list[int], Stage]:
    stage = Stage(Setup(eos_token_ids=eos))
    stage.add(make_request(request_id, 5, 30, **fields))
    return stage.run().tokens[request_id], stage


def test_end_of_sequence_and_stop_ids_end_with_stop_and_are_counted() -> None:
    full, _ = tokens_of()
    assert len(full) == 30
    end = next(i for i, token in enumerate(full) if i >= 7 and token not in full[:i])
    for fields in ({"eos": frozenset({full[end], 63})}, {"stop_token_ids": (full[end],)},
                   {"stop_token_ids": (full[end],), "ignore_eos": True}):
        cut, stage = tokens_of(**fields)
        assert cut == full[: end + 1]
        assert stage.reasons["a"] is FinishReason.STOP
        assert stage.finished["a"].stop == StopMatch(token_id=full[end])


def test_ignore_eos_runs_to_max_tokens() -> None:
    full, _ = tokens_of()
    ignoring, stage = tokens_of(eos=frozenset(full), ignore_eos=True)
    assert ignoring == full
    assert stage.reasons["a"] is FinishReason.LENGTH


def test_an_end_on_the_last_allowed_token_is_a_stop() -> None:
    full, _ = tokens_of()
    stage = Stage(Setup(eos_token_ids=frozenset({full[0]})))
    stage.add(make_request("a", 5, max_tokens=1))
    assert stage.run().reasons["a"] is FinishReason.STOP


def answer(stage: Stage, *rows: RowResult):
    plan = stage.schedule()
    return stage.scheduler.update(plan, StepResult(plan.step_id, rows), stage.now)


def test_a_stop_string_outranks_everything_on_its_token() -> None:
    stage = Stage(Setup(eos_token_ids=frozenset({9})))
    stage.add(make_request("a", 5, max_tokens=1))
    match = StopMatch(text="END", num_text_chars=4)
    (output,) = answer(stage, RowResult("a", (9,), stop=match))
    assert (output.finish_reason, output.stop, output.token_ids) == (FinishReason.STOP, match, (9,))


def test_of_several_tokens_none_past_the_end_is_taken() -> None:
    stage = Stage(Setup())
    stage.add(make_request("a", 5, max_tokens=2))
    (output,) = answer(stage, RowResult("a", (7, 8, 9), logprobs=(-0.1, -0.2, -0.3), stop=StopMatch(text="x")))
    assert (output.token_ids, output.logprobs) == ((7, 8), (-0.1, -0.2))
    assert output.finish_reason is FinishReason.LENGTH
    assert stage.scheduler.stats().num_generation_tokens == 2


def test_no_end_counts_before_min_tokens_are_out() -> None:
    stage = Stage(Setup(eos_token_ids=frozenset({EOS})))
    stage.add(make_request("a", max_tokens=9, min_tokens=2, stop_token_ids=(7,)))
    for token_ids in ((EOS,), (7,)):
        (output,) = answer(stage, RowResult("a", token_ids))
        assert output.finish_reason is None
    (output,) = answer(stage, RowResult("a", (EOS,)))
    assert output.finish_reason is FinishReason.STOP


def test_min_tokens_that_cannot_be_reached_end_at_the_context_limit() -> None:
    stage = Stage(Setup(max_model_len=16))
    stage.add(make_request("a", 10, max_tokens=500, min_tokens=500, ignore_eos=True))
    stage.run()
    assert (len(stage.tokens["a"]), stage.reasons["a"]) == (6, FinishReason.LENGTH)


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, (EOS, 5, 7)), (True, (7,))])
def test_what_min_tokens_rule_out_is_in_the_plan(ignore_eos: bool, expected: tuple[int, ...]) -> None:
    stage = Stage(Setup(eos_token_ids=frozenset({EOS, 5})))
    stage.add(make_request("a", min_tokens=1, stop_token_ids=(7,), ignore_eos=ignore_eos), make_request("b", salt=1))
    refs = {row.request_id: row.sampling for row in stage.step().rows}
    assert refs["a"].end_token_ids == expected and refs["b"].end_token_ids == ()

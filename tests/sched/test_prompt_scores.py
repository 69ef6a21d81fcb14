"""Log-probabilities of the prompt: every token once and in order, whatever the schedule, and never from the cache."""

from __future__ import annotations

import pytest

from paceline.request import Request
from paceline.sched import step_builder

from ..fakes import Setup, Stage, make_request, solo_stage


def scored_request(name: str, num_tokens: int, **fields: object) -> Request:
    return make_request(name, num_tokens, prompt_logprobs=0, **fields)


def test_every_token_but_the_first_is_scored() -> None:
    stage = Stage(Setup())
    stage.add(scored_request("a", 9))
    stage.run()
    prompt = make_request("a", 9).prompt_token_ids
    assert tuple(one.token_id for one in stage.scores["a"]) == prompt[1:]


def test_a_prompt_of_one_token_has_no_scores() -> None:
    stage = Stage(Setup())
    stage.add(scored_request("a", 1))
    assert stage.run().scores == {} and len(stage.tokens["a"]) == 4


@pytest.mark.parametrize("num_tokens", [20, 21])
@pytest.mark.parametrize("budget", [1, 2, 3, 7, 10, 20, 64])
def test_chunks_change_no_score(budget: int, num_tokens: int) -> None:
    """Prompts of exactly two chunks, and of one token more, among them."""
    stage = Stage(Setup(max_num_batched_tokens=budget))
    stage.add(scored_request("a", num_tokens), make_request("b", 9, salt=3, arrival_time=1.0))
    stage.run()
    assert stage.scores == {"a": solo_stage(scored_request("a", num_tokens), Setup()).scores["solo"]}


def test_cached_positions_are_computed_again() -> None:
    stage = Stage(Setup())
    stage.add(make_request("first", 33))
    stage.run()
    stage.add(scored_request("a", 33))
    stage.run()
    assert stage.finished["a"].num_cached_tokens == 0
    assert stage.scores["a"] == solo_stage(scored_request("a", 33), Setup()).scores["solo"]
    stage.add(make_request("last", 33))
    assert stage.run().finished["last"].num_cached_tokens == 32    # what it computed serves others


def test_a_preempted_request_scores_only_what_it_had_not() -> None:
    setup = Setup(num_blocks=14, max_num_batched_tokens=9, prefix_cache="none")
    stage = Stage(setup)
    hungry = [scored_request(f"r{i}", 17, max_tokens=20, salt=i) for i in range(3)]
    stage.add(*hungry)
    stage.run()
    assert stage.num_preemptions > 0
    for request in hungry:
        assert stage.scores[request.request_id] == solo_stage(request, setup).scores["solo"]
    num_scored = sum(row.num_scored for plan in stage.plans for row in plan.rows)
    assert num_scored == 3 * 16


def test_a_step_scores_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_builder, "MAX_SCORED_TOKENS", 5)
    stage = Stage(Setup(max_num_batched_tokens=64))
    requests = [scored_request(f"r{i}", 20 + i, salt=i) for i in range(3)]
    stage.add(*requests, make_request("plain", 20, salt=7))
    stage.run()
    per_step = [sum(row.num_scored for row in plan.rows) for plan in stage.plans]
    assert max(per_step) == 5
    refused = {plan.refusal.limit for plan in stage.plans if plan.refusal is not None}
    assert refused == {"max_scored_tokens"}
    for request in requests:
        assert stage.scores[request.request_id] == solo_stage(request, Setup()).scores["solo"]


def test_choices_of_one_prompt_score_it_once() -> None:
    stage = Stage(Setup())
    stage.add(scored_request("a", 10, num_choices=3))
    stage.run()
    assert list(stage.scores) == ["a"] and len(stage.scores["a"]) == 9
    assert len(stage.finished) == 3
    last_score = max(i for i, output in enumerate(stage.outputs) if output.prompt_logprobs)
    first_token = min(i for i, output in enumerate(stage.outputs) if output.token_ids)
    assert last_score <= first_token

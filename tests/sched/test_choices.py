"""Several choices of one prompt: computed once, then parted."""

from __future__ import annotations

import pytest

from paceline.errors import RequestError
from paceline.request import FinishReason

from ..fakes import Setup, Stage, make_request, solo


def choices_alone(num_choices: int, setup: Setup, *args, **fields) -> dict[str, list[int]]:
    names = ["p"] + [f"p:{i}" for i in range(1, num_choices)]
    return {name: solo(make_request("p", *args, choice_index=i, **fields), setup) for i, name in enumerate(names)}


@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("prefix_cache", ["none", "hash"])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 16])
def test_each_choice_equals_its_solo_run(num_prompt_tokens: int, prefix_cache: str, max_num_seqs: int) -> None:
    setup = Setup(max_num_seqs=max_num_seqs, max_num_batched_tokens=8, prefix_cache=prefix_cache)
    stage = Stage(setup)
    stage.add(make_request("p", num_prompt_tokens, 7, num_choices=4, seed=3))
    stage.run()
    assert stage.tokens == choices_alone(4, setup, num_prompt_tokens, 7, seed=3)
    assert len({tuple(tokens) for tokens in stage.tokens.values()}) == 4
    indexes = {name: output.choice_index for name, output in stage.finished.items()}
    assert indexes == {"p": 0, "p:1": 1, "p:2": 2, "p:3": 3}


def test_the_prompt_is_computed_once_and_only_the_last_block_is_copied() -> None:
    stage = Stage(Setup(block_size=4))
    stage.add(make_request("p", 11, 4, num_choices=3))
    first, second = stage.step(), stage.step()
    assert [(row.request_id, row.num_tokens, row.sampling) for row in first.rows] == [("p", 10, None)]
    assert [(row.request_id, row.num_computed_tokens, row.num_tokens) for row in second.rows] == [
        ("p", 10, 1), ("p:1", 10, 1), ("p:2", 10, 1)]
    tables = [row.block_ids[0] for row in second.rows]
    assert len({table[:2] for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    assert len(second.transfers) == 2            # the last of three writes where the prompt lies
    stage.run()
    assert stage.scheduler.stats().num_prompt_tokens_computed == 10 + 3


def test_nothing_is_copied_where_the_last_token_opens_a_block() -> None:
    stage = Stage(Setup(block_size=4))
    stage.add(make_request("p", 9, 4, num_choices=3))
    stage.run()
    assert not any(plan.transfers for plan in stage.plans)


def test_a_cached_prompt_forks_at_once() -> None:
    stage = Stage(Setup(block_size=4))
    stage.add(make_request("before", 9, 2))
    stage.run()
    num_plans = len(stage.plans)
    stage.add(make_request("p", 9, 4, num_choices=3))
    stage.run()
    first, second = stage.plans[num_plans : num_plans + 2]
    assert [(row.request_id, row.num_computed_tokens) for row in first.rows] == [("p", 8)]
    assert [row.request_id for row in second.rows] == ["p", "p:1", "p:2"]


def test_choices_beyond_the_batch_wait_their_turn() -> None:
    stage = Stage(Setup(max_num_seqs=2))
    stage.add(make_request("p", 10, 3, num_choices=5))
    stage.step()
    stage.add(make_request("q", 3, 2, arrival_time=1.0))
    assert stage.scheduler.stats().num_running == 2
    assert stage.scheduler.stats().num_waiting == 4
    stage.run()
    assert set(stage.finished) == {"p", "p:1", "p:2", "p:3", "p:4", "q"}
    starts = {name: output.timeline.first_scheduled_at for name, output in stage.finished.items()}
    assert starts.pop("q") >= max(starts.values())      # they asked first


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("is_in_flight", [False, True])
def test_aborting_the_parent_aborts_all_choices_at_any_moment(num_steps: int, is_in_flight: bool) -> None:
    stage = Stage(Setup(max_num_batched_tokens=6, max_num_seqs=3))
    stage.add(make_request("p", 10, 8, num_choices=4))
    for _ in range(num_steps):
        stage.step()
    plan = stage.schedule() if is_in_flight else None
    stage.abort("p")
    assert stage.reasons == dict.fromkeys(("p", "p:1", "p:2", "p:3"), FinishReason.ABORT)
    assert not stage.scheduler.has_work()
    if plan is not None:
        stage.update(plan)
    stats = stage.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_the_parent_id_still_ends_the_others_when_choice_0_has_ended() -> None:
    setup = Setup()
    stage = Stage(setup)
    stop = solo(make_request("p", 6, 3), setup)[1]
    stage.add(make_request("p", 6, 30, num_choices=3, stop_token_ids=(stop,)))
    while "p" not in stage.finished:
        stage.step()
    rest = {name for name in ("p:1", "p:2") if name not in stage.finished}
    assert rest, "the story needs a choice that outlives choice 0"
    stage.abort("p")
    assert {stage.reasons[name] for name in rest} == {FinishReason.ABORT}
    assert stage.reasons["p"] is FinishReason.STOP


def test_one_choice_can_leave_before_or_after_it_is_born() -> None:
    setup = Setup(max_num_batched_tokens=6)
    stage = Stage(setup)
    stage.add(make_request("p", 10, 8, num_choices=4))
    stage.step()
    stage.abort("p:2")
    for _ in range(2):
        stage.step()
    stage.abort("p:1")
    stage.run()
    alone = choices_alone(4, setup, 10, 8)
    assert stage.reasons["p:2"] is stage.reasons["p:1"] is FinishReason.ABORT
    assert (stage.tokens["p"], stage.tokens["p:3"]) == (alone["p"], alone["p:3"])


def test_all_other_choices_leaving_early_makes_a_plain_request() -> None:
    setup = Setup(max_num_batched_tokens=6)
    stage = Stage(setup)
    stage.add(make_request("p", 10, 8, num_choices=2))
    stage.step()
    stage.abort("p:1")
    assert stage.run().tokens["p"] == solo(make_request("p", 10, 8), setup)


def test_a_parent_preempted_before_the_fork_still_gets_its_choices() -> None:
    setup = Setup(num_blocks=12, block_size=4, max_num_batched_tokens=6, max_model_len=44)
    stage = Stage(setup)
    stage.add(make_request("old", 4, 38, salt=1))
    for _ in range(18):
        stage.step()
    parent = make_request("p", 24, 6, num_choices=3, arrival_time=1.0)
    stage.add(parent)
    stage.run()
    assert parent.num_preemptions > 0
    assert {name: stage.tokens[name] for name in ("p", "p:1", "p:2")} == choices_alone(3, setup, 24, 6)


@pytest.mark.parametrize("num_blocks", [8, 9, 11, 14])
@pytest.mark.parametrize("victim", ["latest_arrival", "lowest_priority"])
def test_choices_on_few_blocks_equal_those_on_many(num_blocks: int, victim: str) -> None:
    setup = Setup(num_blocks=num_blocks, block_size=4, victim=victim, max_model_len=32, transfer_delay=2)
    stage = Stage(setup)
    stage.add(make_request("p", 14, 12, num_choices=4), make_request("q", 9, 9, salt=1, arrival_time=1.0))
    stage.run()
    assert stage.num_preemptions > 0
    assert {name: stage.tokens[name] for name in ("p", "p:1", "p:2", "p:3")} == choices_alone(4, setup, 14, 12)


def test_a_running_request_can_be_forked_in_the_middle() -> None:
    setup = Setup()
    stage = Stage(setup)
    parent = make_request("a", 6, 12)
    stage.add(parent)
    for _ in range(4):
        stage.step()
    child = make_request("b", 6, 12, seed=5, parent_id="a")
    child.output_token_ids = list(parent.output_token_ids)
    num_known = len(child.output_token_ids)
    stage.scheduler.fork("a", child)
    stage.scheduler.check()
    stage.run()
    assert stage.tokens["a"] == solo(parent, setup)
    known = (*parent.prompt_token_ids, *parent.output_token_ids[:num_known])
    continued = make_request("c", known, 12 - num_known, seed=5)
    assert stage.tokens["b"] == solo(continued, setup)


def test_only_a_running_request_is_forked_and_only_by_its_own_tokens() -> None:
    stage = Stage(Setup())
    stage.add(make_request("a", 6, 12))
    with pytest.raises(RequestError):
        stage.scheduler.fork("a", make_request("b", 6))
    stage.step()
    with pytest.raises(RequestError):
        stage.scheduler.fork("a", make_request("b", 6, salt=1))
    with pytest.raises(RequestError):
        stage.scheduler.fork("a", make_request("a", 7))
    stage.run()


def test_forks_of_forks_end_with_the_first_parent() -> None:
    stage = Stage(Setup())
    stage.add(make_request("a", 6, 30))
    stage.step()
    for parent_id, child_id, num_tokens in (("a", "b", 7), ("b", "c", 8)):
        stage.scheduler.fork(parent_id, make_request(child_id, num_tokens, 30, parent_id=parent_id))
        stage.step()
    stage.abort("a")
    assert stage.reasons == dict.fromkeys("abc", FinishReason.ABORT)

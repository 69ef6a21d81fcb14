"""A step's token budget: prompts in pieces, decode beside them."""

from __future__ import annotations

import pytest

from paceline.sched.chunking import beside_decode

from ..fakes import Setup, Stage, make_request, solo


def test_nothing_is_sampled_before_the_last_prompt_token() -> None:
    stage = Stage(Setup(max_num_batched_tokens=32))
    stage.add(make_request("a", 100, 2))
    stage.run()
    rows = [row for plan in stage.plans for row in plan.rows]
    assert [row.num_tokens for row in rows] == [32, 32, 32, 4, 1]
    assert [row.sampling is not None for row in rows] == [False, False, False, True, True]
    assert [row.logits_offsets for row in rows] == [(), (), (), (3,), (0,)]


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 31, 32, 33, 64, 65])
def test_chunk_edges_change_nothing(num_prompt_tokens: int) -> None:
    setup = Setup(max_num_batched_tokens=16)
    request = make_request("a", num_prompt_tokens, 6)
    stage = Stage(setup)
    stage.add(request)
    assert stage.run().tokens["a"] == solo(request, setup)


@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 3, 7, 16, 64])
def test_the_budget_changes_nothing(max_num_batched_tokens: int) -> None:
    setup = Setup(max_num_batched_tokens=max_num_batched_tokens)
    requests = [make_request(f"r{i}", 3 + 5 * i, 4 + i, salt=i % 3, seed=i, arrival_time=i / 4) for i in range(6)]
    stage = Stage(setup)
    stage.add(*requests)
    stage.run()
    assert stage.tokens == {request.request_id: solo(request, setup) for request in requests}


def test_decode_and_prefill_share_a_step() -> None:
    stage = Stage(Setup(max_num_batched_tokens=10))
    stage.add(make_request("a", 4, 9))
    stage.step()
    stage.add(make_request("b", 30, 2, arrival_time=1.0, salt=1))
    assert {row.request_id: row.num_tokens for row in stage.step().rows} == {"a": 1, "b": 9}


def test_a_long_prompt_ahead_leaves_decode_its_tokens() -> None:
    """An urgent prompt overtakes in the order, but those who decode behind it keep their pace."""
    stage = Stage(Setup(max_num_batched_tokens=10, ordering="priority"))
    stage.add(*(make_request(f"d{i}", 2, 30, salt=i) for i in range(3)))
    stage.step()
    stage.add(make_request("urgent", 40, 2, priority=-1, salt=9))
    stage.step()
    for _ in range(3):
        assert {row.request_id: row.num_tokens for row in stage.step().rows} == {"urgent": 7, "d0": 1, "d1": 1, "d2": 1}


def test_the_first_in_order_progresses_however_many_decode_behind() -> None:
    view = Stage(Setup()).scheduler._view(0.0)
    assert beside_decode(view, 10, budget_left=4, num_decodes_behind=6) == 1
    assert beside_decode(view, 10, budget_left=4, num_decodes_behind=1) == 3
    assert beside_decode(view, 2, budget_left=4, num_decodes_behind=1) == 2

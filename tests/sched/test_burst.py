"""Prompts that arrive together with one prefix compute it once."""

from __future__ import annotations

import pytest

from ..fakes import Setup, Stage, make_request, solo

PREFIX = tuple(i % 47 + 1 for i in range(40))


def burst(num_requests: int, **setup: object) -> Stage:
    """Equal prefixes of ten blocks, then two tokens of each one's own."""
    stage = Stage(Setup(block_size=4, max_num_seqs=32, **setup))
    stage.add(*(make_request(f"r{i:02}", (*PREFIX, i + 1, i + 2), 5, seed=i) for i in range(num_requests)))
    return stage


@pytest.mark.parametrize("budget", [16, 64, 512])
@pytest.mark.parametrize("chunking", ["fixed", "whole", "itl_bounded"])
def test_a_burst_of_sixteen_equal_prefixes_computes_the_prefix_once(budget: int, chunking: str) -> None:
    stage = burst(16, max_num_batched_tokens=budget, chunking=chunking).run()
    assert stage.scheduler.stats().num_prompt_tokens_computed == 40 + 16 * 2
    for i in range(16):
        assert stage.tokens[f"r{i:02}"] == solo(make_request("x", (*PREFIX, i + 1, i + 2), 5, seed=i), stage.setup)


def test_the_wait_is_told_and_ends_with_the_step_that_registers_the_block() -> None:
    stage = burst(3, max_num_batched_tokens=512)
    first = stage.step()
    assert [row.request_id for row in first.rows] == ["r00"]
    assert first.refusal is not None and first.refusal.limit == "prefix_in_flight"
    assert {row.request_id: row.num_computed_tokens for row in stage.step().rows} == {"r00": 42, "r01": 40, "r02": 40}


def test_nobody_waits_for_one_who_stands_still_or_has_left() -> None:
    stage = burst(2, max_num_batched_tokens=16)
    stage.step()
    stage.abort("r00")
    assert [row.request_id for row in stage.step().rows] == ["r01"]
    stage.run()
    assert stage.tokens["r01"] == solo(make_request("x", (*PREFIX, 2, 3), 5, seed=1), stage.setup)


def test_other_salts_do_not_wait() -> None:
    stage = Stage(Setup(block_size=4))
    stage.add(*(make_request(name, PREFIX, 3, cache_extras=(name,)) for name in ("a", "b")))
    assert len(stage.step().rows) == 2


def test_a_static_batch_keeps_its_door_open_for_those_who_wait_for_the_prefix() -> None:
    stage = burst(4, regime="static", max_num_batched_tokens=512)
    stage.step()
    stage.step()
    assert len(stage.scheduler.running) == 4


def test_without_a_prefix_cache_there_is_nothing_to_wait_for() -> None:
    stage = burst(3, max_num_batched_tokens=512, prefix_cache="none")
    assert len(stage.step().rows) == 3

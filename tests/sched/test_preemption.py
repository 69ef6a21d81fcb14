"""Blocks run out: who yields, what is lost, and that nothing is forgotten."""

from __future__ import annotations

import pytest

from paceline.request import FinishReason, RequestStatus

from ..fakes import Setup, Stage, make_request, solo


def workload(num_requests: int = 6) -> list:
    return [make_request(f"r{i}", 5 + 3 * i, 12, salt=i, seed=i, arrival_time=float(i)) for i in range(num_requests)]


def run(**setup) -> Stage:
    stage = Stage(Setup(**setup))
    stage.add(*workload())
    return stage.run()


@pytest.mark.parametrize("prefix_cache", ["none", "hash"])
def test_a_preempted_request_forgets_nothing(prefix_cache: str) -> None:
    roomy, starved = run(num_blocks=400), run(num_blocks=14, prefix_cache=prefix_cache)
    assert roomy.num_preemptions == 0
    assert starved.num_preemptions > 0
    assert starved.tokens == roomy.tokens
    assert {request.request_id: solo(request, starved.setup) for request in workload()} == starved.tokens


def test_a_resumed_request_runs_prompt_and_output_before_it_samples_again() -> None:
    """Small chunks: after its prompt alone it must not count as decoding."""
    setup = Setup(num_blocks=12, block_size=4, max_num_batched_tokens=5, prefix_cache="none")
    stage = Stage(setup)
    old, young = make_request("old", 3, 40), make_request("young", 3, 40, salt=1, arrival_time=1.0)
    stage.add(old, young)
    while young.status is not RequestStatus.PREEMPTED:
        stage.step()
    num_known = young.num_tokens
    assert young.num_output_tokens > 5
    assert (young.num_computed_tokens, young.block_tables) == (0, ())
    num_plans = len(stage.plans)
    stage.run()
    again = [row for plan in stage.plans[num_plans:] for row in plan.rows if row.request_id == "young"]
    prefill = [row for row in again if row.num_computed_tokens < num_known - 1]
    assert sum(row.num_tokens for row in prefill) >= num_known - 1
    assert all(row.sampling is None for row in prefill if row.num_computed_tokens + row.num_tokens < num_known)
    assert stage.tokens["young"] == solo(young, setup)


def test_each_token_is_reported_once_through_two_preemptions() -> None:
    stage = Stage(Setup(num_blocks=10, block_size=4))
    lengths = (8, 16, 30, 24)
    requests = [make_request(f"r{i}", 4, lengths[i], salt=i, arrival_time=float(i)) for i in range(4)]
    stage.add(*requests)
    stage.run()
    assert requests[-1].num_preemptions >= 2
    assert stage.tokens == {request.request_id: solo(request, stage.setup) for request in requests}


def test_two_that_do_not_fit_together_both_end_after_few_preemptions() -> None:
    stage = Stage(Setup(num_blocks=10, block_size=4, max_model_len=40))
    stage.add(make_request("old", 4, 40), make_request("young", 4, 40, salt=1, arrival_time=1.0))
    stage.run(max_steps=200)
    assert 0 < stage.num_preemptions <= 10      # each costs the old one a block of growth
    assert stage.finished["old"].timeline.num_preemptions == 0
    assert set(stage.reasons.values()) == {FinishReason.LENGTH}


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    stage = Stage(Setup(num_blocks=14, max_num_batched_tokens=16))
    stage.add(*workload())
    started: set[str] = set()
    while stage.scheduler.has_work():
        plan = stage.step()
        new = {row.request_id for row in plan.rows} - started
        assert not (plan.preempted and new)
        started |= new
        started -= {victim.request_id for victim in plan.preempted}
    assert stage.num_preemptions > 0


def test_not_even_an_urgent_newcomer_starts_in_a_step_that_preempted() -> None:
    def stage_before(num_steps: int) -> Stage:
        stage = Stage(Setup(num_blocks=9, block_size=4, max_model_len=30, ordering="priority"))
        stage.add(make_request("a", 4, 20), make_request("b", 4, 20, salt=1, priority=5))
        for _ in range(num_steps):
            stage.step()
        return stage

    num_steps = next(n for n in range(50) if stage_before(n + 1).num_preemptions)
    stage = stage_before(num_steps)
    stage.add(make_request("urgent", 2, 2, salt=2, priority=1))
    first, second = stage.step(), stage.step()
    assert [victim.request_id for victim in first.preempted] == ["b"]
    assert [row.request_id for row in first.rows] == ["a"]
    assert [row.request_id for row in second.rows] == ["a", "urgent"]
    stage.run()


def starve(**setup) -> tuple[Stage, list[str]]:
    """Three growing requests on too few blocks; returns who was preempted first."""
    stage = Stage(Setup(num_blocks=9, block_size=4, max_model_len=30, **setup))
    stage.add(make_request("a", 4, 20, salt=0, arrival_time=0.0, priority=0),
              make_request("b", 4, 20, salt=1, arrival_time=1.0, priority=9),
              make_request("c", 4, 20, salt=2, arrival_time=2.0, priority=5))
    while not stage.num_preemptions:
        stage.step()
    return stage, [victim.request_id for victim in stage.plans[-1].preempted]


def test_the_latest_arrival_yields_first() -> None:
    stage, victims = starve(victim="latest_arrival")
    assert victims[0] == "c"
    assert stage.run().reasons.keys() == {"a", "b", "c"}


def test_the_lowest_priority_yields_first() -> None:
    stage, victims = starve(victim="lowest_priority")
    assert victims[0] == "b"
    stage.run()


def test_a_higher_priority_never_yields_to_a_lower_one() -> None:
    """Three of one size; the most urgent came last, and whoever lacks a block takes it from behind or yields itself."""
    for victim in ("latest_arrival", "lowest_priority"):
        stage = Stage(Setup(num_blocks=9, block_size=4, max_model_len=30, ordering="priority", victim=victim))
        for i, name in enumerate("abc"):
            stage.add(make_request(name, 4, 20, salt=i, arrival_time=float(i), priority=-i))
        stage.run()
        assert stage.num_preemptions > 0
        assert list(stage.finished) == ["c", "b", "a"]
        assert stage.finished["c"].timeline.num_preemptions == 0


def test_what_was_lost_is_in_the_plan_and_in_the_counters() -> None:
    stage, _ = starve(prefix_cache="none")
    (victim,) = stage.plans[-1].preempted
    assert victim.num_lost_tokens == 12
    assert victim.num_freed_blocks == 3
    stage.run()
    stats = stage.scheduler.stats()
    lost = sum(victim.num_lost_tokens for plan in stage.plans for victim in plan.preempted)
    assert stats.num_recomputed_tokens == lost
    assert stats.num_prompt_tokens_computed == 12
    assert stats.num_generation_tokens == 60
    assert stats.num_steps == len(stage.plans)


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    with_cache, _ = starve(prefix_cache="hash")
    without, _ = starve(prefix_cache="none")
    with_cache.run()
    without.run()
    assert with_cache.tokens == without.tokens
    assert with_cache.scheduler.stats().num_recomputed_tokens < without.scheduler.stats().num_recomputed_tokens
    assert {output.num_cached_tokens for output in with_cache.finished.values()} == {0}    # its own do not count

"""Blocks run out: who yields, what is lost, and that nothing is forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import FinishReason, RequestStatus
from paceline.sched.preemption import VICTIM_RULES

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


# ---- a part of a victim's blocks


def grown(preemption: str, **setup: object) -> Stage:
    """Two that grow until the pool of 12 blocks is short."""
    stage = Stage(Setup(num_blocks=12, block_size=4, preemption=preemption, prefix_cache="none", **setup))
    stage.add(make_request("old", 8, 30, salt=1), make_request("young", 20, 25, salt=2, arrival_time=1.0))
    return stage


def test_a_victim_keeps_the_head_of_its_blocks_and_loses_no_more_than_is_missing() -> None:
    stage = grown("recompute_tail")
    while not stage.plans or not stage.plans[-1].preempted:
        stage.step()
    (preempted,) = stage.plans[-1].preempted
    young = next(iter(stage.scheduler.waiting))
    assert (preempted.request_id, preempted.num_freed_blocks) == ("young", 1)
    assert 0 < preempted.num_lost_tokens <= 4
    assert young.num_computed_tokens == 4 * len(young.block_tables[0]) > 16
    stage.run()
    assert stage.tokens["young"] == solo(make_request("x", 20, 25, salt=2), stage.setup)


def test_keeping_the_head_recomputes_less() -> None:
    tail, everything = grown("recompute_tail").run(), grown("recompute").run()
    assert tail.tokens == everything.tokens
    lost = [stage.scheduler.stats().num_recomputed_tokens for stage in (tail, everything)]
    assert 0 < lost[0] < lost[1]


def test_kept_blocks_go_before_anyone_who_runs_loses_one() -> None:
    stage = Stage(Setup(num_blocks=16, block_size=4, preemption="recompute_tail", prefix_cache="none"))
    stage.add(*(make_request(name, 8, 40, salt=i, arrival_time=float(i)) for i, name in enumerate("abc")))
    stage.run()
    first = next(i for i, plan in enumerate(stage.plans) if plan.preempted)
    victims = [one.request_id for plan in stage.plans[first:] for one in plan.preempted]
    assert victims[0] == "c"
    c_again = next(i for i, plan in enumerate(stage.plans) if i > first and any(r.request_id == "c" for r in plan.rows))
    b_lost = next((i for i, plan in enumerate(stage.plans) if any(p.request_id == "b" for p in plan.preempted)), None)
    if b_lost is not None and b_lost < c_again:    # then c had nothing left to give
        assert next(row for row in stage.plans[c_again].rows if row.request_id == "c").num_computed_tokens == 0


def test_an_aborted_victim_gives_back_what_it_kept() -> None:
    stage = grown("recompute_tail")
    while not stage.plans or not stage.plans[-1].preempted:
        stage.step()
    stage.abort("young", "old")
    assert stage.scheduler.stats().num_free_blocks == 12


@settings(deadline=None, max_examples=150, derandomize=True)
@given(lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=8),
       num_blocks=st.integers(14, 20), budget=st.sampled_from([3, 16, 64]),
       victim=st.sampled_from(sorted(VICTIM_RULES)),
       prefix_cache=st.sampled_from(["none", "hash"]), ordering=st.sampled_from(["fcfs", "priority"]))
def test_partial_recompute_never_deadlocks(lengths, num_blocks, budget, victim, prefix_cache, ordering) -> None:
    """Nobody starves though victims wait with blocks that others need, and the first in order is never a victim."""
    stage = Stage(Setup(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=budget, victim=victim,
                        preemption="recompute_tail", prefix_cache=prefix_cache, ordering=ordering, max_model_len=56))
    stage.add(*(make_request(f"r{i}", prompt, length, salt=i % 3, arrival_time=float(i), priority=i % 2)
                for i, (prompt, length) in enumerate(lengths)))
    stage.run(max_steps=sum(prompt + length for prompt, length in lengths) * 8 + 100)
    assert len(stage.finished) == len(lengths)
    if ordering == "fcfs":
        assert not any(one.request_id == "r0" for plan in stage.plans for one in plan.preempted)


# ---- never


def test_never_stands_still_until_those_ahead_have_ended() -> None:
    """Under an admission that assures nothing, as after a switch: only the first in order may take blocks."""
    stage = grown("never").run()
    assert {one.request_id for plan in stage.plans for one in plan.preempted} <= {"young"}
    assert stage.tokens["young"] == solo(make_request("x", 20, 25, salt=2), stage.setup)


def test_reserve_needs_no_preemption_where_watermark_does() -> None:
    assured = Stage(Setup(num_blocks=14, admission="reserve", preemption="never"))
    assured.add(*workload())
    assert assured.run().num_preemptions == 0
    assert assured.tokens == run(num_blocks=400).tokens
    assert run(num_blocks=14).num_preemptions > 0


# ---- more than the pool


@pytest.mark.parametrize("preemption", ["recompute", "recompute_tail"])
def test_a_pool_that_was_over_admitted_thrashes_within_bounds_and_recovers(preemption: str) -> None:
    """Sixteen start where three can end. Whoever is first goes on, so every step gives a token, and a victim starts
    again only when there is room, so nobody loses more often than it would have grown by a block. When the load falls
    to what fits, nothing of the thrash is left."""
    setup = Setup(num_blocks=40, block_size=4, max_num_seqs=16, prefix_cache="none", preemption=preemption)
    stage = Stage(setup)
    crowd = [make_request(f"r{i:02}", 8, 40, salt=i, seed=i, arrival_time=i / 100) for i in range(40)]
    stage.add(*crowd)
    while stage.scheduler.has_work():
        num_tokens = sum(map(len, stage.tokens.values()))
        stage.step()
        assert sum(map(len, stage.tokens.values())) > num_tokens
    assert stage.num_preemptions > len(crowd)
    assert max(request.num_preemptions for request in crowd) <= 40 // setup.block_size
    assert stage.tokens == {request.request_id: solo(request, setup) for request in crowd}
    before = stage.num_preemptions
    for i in range(12):
        stage.add(make_request(f"later{i}", 8, 40, salt=50 + i, arrival_time=stage.now))
        for _ in range(25):
            stage.step()
    stage.run()
    assert stage.num_preemptions == before


def test_a_cache_that_thrashes_beyond_its_capacity_costs_time_and_nothing_else() -> None:
    """Six conversations in turn, each longer than what the others leave of the cache: every hit has been evicted."""
    rounds = [make_request(f"turn{turn}-{i}", 40, 4, salt=i, seed=i, arrival_time=float(6 * turn + i))
              for turn in range(3) for i in range(6)]
    thrashing, roomy = Stage(Setup(num_blocks=24, max_num_seqs=1)), Stage(Setup(num_blocks=400, max_num_seqs=1))
    for stage in (thrashing, roomy):
        for request in rounds:
            stage.add(make_request(request.request_id, request.prompt_token_ids, 4, seed=request.sampling.seed,
                                   arrival_time=request.arrival_time))
        stage.run()
    assert thrashing.tokens == roomy.tokens
    assert thrashing.scheduler.stats().prefix_cache_hits == 0 < roomy.scheduler.stats().prefix_cache_hits
    assert thrashing.scheduler.stats().num_free_blocks == 24


# ---- who pays


@pytest.mark.parametrize(("victim", "pays"), [("latest_arrival", "late"), ("lowest_priority", "mild"),
                                              ("most_blocks", "wide"), ("most_remaining", "endless")])
def test_each_victim_rule_picks_whom_it_names(victim: str, pays: str) -> None:
    """`first` needs a block; of the four behind it the rule's own kind pays first."""
    stage = Stage(Setup(num_blocks=26, block_size=4, victim=victim, max_num_batched_tokens=200, prefix_cache="none"))
    kinds = {"first": (20, 40, 0), "wide": (33, 30, 0), "mild": (13, 30, 5), "endless": (13, 90, 0),
             "late": (13, 30, 0)}
    stage.add(*(make_request(name, prompt, length, salt=i, priority=priority, arrival_time=float(i))
                for i, (name, (prompt, length, priority)) in enumerate(kinds.items())))
    while not stage.plans or not stage.plans[-1].preempted:
        stage.step()
    assert stage.plans[-1].preempted[0].request_id == pays


@pytest.mark.parametrize("victim", sorted(VICTIM_RULES))
@pytest.mark.parametrize("preemption", ["recompute", "recompute_tail"])
def test_no_victim_rule_changes_a_token(victim: str, preemption: str) -> None:
    starved = run(num_blocks=14, victim=victim, preemption=preemption)
    assert starved.num_preemptions > 0
    assert starved.tokens == run(num_blocks=400).tokens

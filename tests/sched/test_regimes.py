"""Batching regimes: who may join when, what a batch costs in idle slots, and that it changes no token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..fakes import Setup, Stage, make_request, solo

# Eight requests on four slots, lengths in tokens generated. A prompt and its first token are one step, so a request
# takes as many steps as it generates tokens, and four lengths in a batch take their longest.
TOY = (7, 2, 12, 3, 2, 9, 8, 5)
WHOLE_BATCHES = ("static", "static_padded", "dynamic")


def staged(lengths: tuple[int, ...], regime: str, max_num_seqs: int = 4, **setup: object) -> Stage:
    stage = Stage(Setup(regime=regime, max_num_seqs=max_num_seqs, max_num_batched_tokens=512, **setup))
    stage.add(*(make_request(f"r{i:03}", 3, length, salt=i, arrival_time=float(i)) for i, length in enumerate(lengths)))
    return stage


def idle_of_batches(lengths: tuple[int, ...], num_slots: int) -> int:
    """The formula: each batch holds all slots until its longest member ends."""
    batches = [lengths[start : start + num_slots] for start in range(0, len(lengths), num_slots)]
    return sum(num_slots * max(batch) - sum(batch) for batch in batches)


@pytest.mark.parametrize(("regime", "num_steps", "idle"), [("static", 21, 36), ("static_padded", 21, 36),
                                                          ("continuous", 12, 0)])
def test_eight_requests_on_four_slots(regime: str, num_steps: int, idle: int) -> None:
    """21 steps with 36 of 84 slot-steps idle, 42.857%, against 12 steps with none."""
    stats = staged(TOY, regime).run().scheduler.stats()
    assert (stats.num_steps, stats.num_idle_slot_steps, stats.num_slot_steps) == (num_steps, idle, 4 * num_steps)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20).map(tuple), num_slots=st.integers(1, 6),
       regime=st.sampled_from(["static", "static_padded"]))
def test_static_idleness_equals_its_formula(lengths: tuple[int, ...], num_slots: int, regime: str) -> None:
    stage = staged(lengths, regime, num_slots).run()
    assert stage.scheduler.stats().num_idle_slot_steps == idle_of_batches(lengths, num_slots)
    assert sum(plan.num_idle_slots for plan in stage.plans) == idle_of_batches(lengths, num_slots)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20).map(tuple), num_slots=st.integers(1, 6))
def test_continuous_leaves_no_slot_idle_while_anyone_waits(lengths: tuple[int, ...], num_slots: int) -> None:
    stage = staged(lengths, "continuous", num_slots).run()
    assert all(plan.num_idle_slots == 0 for plan in stage.plans if plan.num_waiting)


@pytest.mark.parametrize("regime", [*WHOLE_BATCHES, "continuous"])
def test_no_regime_changes_a_token(regime: str) -> None:
    stage = staged(TOY, regime).run()
    for i, length in enumerate(TOY):
        assert stage.tokens[f"r{i:03}"] == solo(make_request("x", 3, length, salt=i), stage.setup)


def test_a_batch_forms_over_several_steps_where_its_prompts_exceed_the_budget() -> None:
    stage = Stage(Setup(regime="static", max_num_seqs=3, max_num_batched_tokens=10))
    stage.add(*(make_request(f"r{i}", 8, 9, salt=i, arrival_time=float(i)) for i in range(5)))
    for _ in range(3):
        stage.step()
    assert [request.request_id for request in stage.scheduler.running] == ["r0", "r1", "r2"]
    stage.run()
    first_of_next = next(plan for plan in stage.plans if any(row.request_id == "r3" for row in plan.rows))
    assert {row.request_id for row in first_of_next.rows} <= {"r3", "r4"}


def test_who_comes_late_waits_for_the_next_batch_and_is_told_why() -> None:
    stage = staged((5, 2), "static")
    stage.step()
    stage.add(make_request("late", 3, 2, salt=9, arrival_time=9.0))
    plans = [stage.step() for _ in range(4)]
    assert all(plan.refusal is not None and plan.refusal.limit == "regime" for plan in plans)
    assert [row.request_id for row in stage.step().rows] == ["late"]


def test_padded_rows_really_run_and_give_nothing() -> None:
    """Every step of a padded batch runs as many rows as the batch has members."""
    stage = staged(TOY[:4], "static_padded").run()
    assert {len(plan.all_rows) for plan in stage.plans} == {4}
    assert stage.scheduler.stats().num_padding_rows == idle_of_batches(TOY[:4], 4)
    assert sum(len(tokens) for tokens in stage.tokens.values()) == sum(TOY[:4])


def test_padding_gives_way_where_blocks_are_short() -> None:
    stage = Stage(Setup(regime="static_padded", num_blocks=8, block_size=4, max_num_seqs=2))
    stage.add(make_request("short", 10, 1, salt=1), make_request("long", 9, 20, salt=2, arrival_time=1.0))
    stage.run()
    assert stage.num_preemptions == 0
    assert len(stage.plans[1].padding) == 1 and not stage.plans[-1].padding
    assert stage.tokens["long"] == solo(make_request("x", 9, 20, salt=2), stage.setup)


def test_an_aborted_member_is_not_padded() -> None:
    stage = staged((9, 9), "static_padded")
    stage.step()
    stage.abort("r000")
    assert not stage.step().padding
    stage.abort("r001")
    assert stage.scheduler.stats().num_free_blocks == stage.setup.num_blocks


def test_a_dynamic_batch_leaves_when_it_is_full() -> None:
    stage = Stage(Setup(regime="dynamic", max_num_seqs=3, batch_timeout_seconds=60.0))
    stage.add(*(make_request(f"r{i}", salt=i) for i in range(2)))
    assert not stage.step().rows
    stage.add(make_request("r2", salt=2))
    assert len(stage.step().rows) == 3


def test_a_dynamic_batch_leaves_when_its_oldest_member_is_due() -> None:
    stage = Stage(Setup(regime="dynamic", max_num_seqs=3, batch_timeout_seconds=2.0))
    stage.add(make_request("old", salt=1, arrival_time=0.0))
    stage.now = 1.0
    stage.add(make_request("young", salt=2, arrival_time=1.0))
    assert stage.scheduler.idle_until(1.0) == 2.0
    assert stage.scheduler.schedule(1.5).rows == ()
    stage.update(stage.scheduler._in_flight)
    assert stage.scheduler.idle_until(2.0) is None
    assert len(stage.scheduler.schedule(2.0).rows) == 2


@pytest.mark.parametrize("regime", ["static", "continuous"])
def test_only_a_regime_that_waits_lets_the_loop_sleep(regime: str) -> None:
    stage = staged((3,), regime)
    assert stage.scheduler.idle_until(0.0) is None


def test_choices_take_slots_of_their_batch_or_wait_for_the_next() -> None:
    stage = Stage(Setup(regime="static", max_num_seqs=3))
    stage.add(make_request("a", 6, 4, num_choices=2), make_request("b", 6, 4, salt=1, arrival_time=1.0, num_choices=3))
    stage.run()
    assert max(len(plan.rows) for plan in stage.plans) <= 3
    assert len(stage.finished) == 5

"""Who may start: order of the queue, limits that say no, and what a refusal tells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import InvariantError, RequestError
from paceline.sched.ordering import Ordering
from paceline.sched.plan import Refusal, RowResult, StepResult
from paceline.sched.wait_queue import DYNAMIC_WINDOW, WaitQueue

from ..fakes import VOCAB_SIZE, Setup, Stage, make_request, solo


def rows_of(plan) -> dict[str, int]:
    return {row.request_id: row.num_tokens for row in plan.rows}


def test_first_come_first_served_whatever_the_order_of_adding() -> None:
    stage = Stage(Setup(max_num_seqs=2))
    stage.add(*(make_request(name, arrival_time=at, salt=int(at)) for name, at in (("c", 3.0), ("a", 1.0), ("b", 2.0))))
    assert list(rows_of(stage.step())) == ["a", "b"]


def test_equal_arrivals_go_by_request_id() -> None:
    stage = Stage(Setup())
    stage.add(make_request("b"), make_request("a", salt=1), make_request("c", salt=2))
    assert list(rows_of(stage.step())) == ["a", "b", "c"]


def test_urgent_requests_start_first() -> None:
    stage = Stage(Setup(ordering="priority", max_num_seqs=1))
    stage.add(make_request("usual", arrival_time=1.0), make_request("urgent", arrival_time=2.0, priority=-1))
    assert list(rows_of(stage.step())) == ["urgent"]


def test_a_head_that_does_not_fit_blocks_the_queue_and_says_why() -> None:
    stage = Stage(Setup(num_blocks=12, block_size=4))
    stage.add(make_request("running", 20, 6, arrival_time=0.0))
    stage.step()
    stage.add(make_request("heavy", 36, 2, arrival_time=1.0, salt=1))
    stage.add(*(make_request(f"tiny{i}", 2, 2, arrival_time=2.0 + i, salt=2) for i in range(10)))
    plan = stage.step()
    assert list(rows_of(plan)) == ["running"]
    assert plan.refusal == Refusal("heavy", "num_kv_blocks", needed=9, available=6)
    assert plan.num_waiting == 11
    stage.run()
    starts = {name: output.timeline.first_scheduled_at for name, output in stage.finished.items()}
    assert len(starts) == 12
    assert starts["heavy"] <= min(at for name, at in starts.items() if name.startswith("tiny"))


def test_a_full_batch_and_a_spent_budget_are_refusals_too() -> None:
    stage = Stage(Setup(max_num_seqs=1))
    stage.add(make_request("a"), make_request("b"))
    assert stage.step().refusal == Refusal("b", "max_num_seqs", needed=1, available=0)
    stage = Stage(Setup(max_num_batched_tokens=5))
    stage.add(make_request("a", 5), make_request("b", 5))
    assert stage.step().refusal == Refusal("b", "max_num_batched_tokens", needed=1, available=0)


def test_the_watermark_keeps_a_margin_while_others_run() -> None:
    stage = Stage(Setup(num_blocks=10, block_size=4, watermark=0.25))
    stage.add(make_request("a", 14, 3, salt=1))       # 4 blocks, 6 left, 3 of them the margin
    stage.step()
    stage.add(make_request("b", 16, 3, arrival_time=1.0, salt=2))
    assert stage.step().refusal == Refusal("b", "num_kv_blocks", needed=4, available=3)
    stage.add(make_request("c", 12, 3, arrival_time=0.5, salt=3))
    assert rows_of(stage.step()) == {"a": 1, "c": 12}


def test_the_budget_counts_only_uncached_tokens() -> None:
    setup = Setup(max_num_batched_tokens=16)
    stage = Stage(setup)
    stage.add(make_request("first", 14, 2))
    stage.run()
    repeats = [make_request(f"r{i}", 14, 2, seed=i, arrival_time=1.0) for i in range(8)]
    stage.add(*repeats)
    assert rows_of(stage.step()) == {f"r{i}": 2 for i in range(8)}        # 12 of 14 come from the cache
    stage.run()
    assert {request.num_cached_tokens for request in repeats} == {12}
    assert stage.tokens["r3"] == solo(repeats[3], setup)
    assert stage.scheduler.stats().prefix_cache_hits == 8 * 12
    assert stage.scheduler.stats().prefix_cache_queries == 9 * 14


def test_many_hits_on_a_prefix_of_32_000_tokens_keep_within_the_budget() -> None:
    """Twelve at once behind one prefix run ten tokens of their own each and the six of the prefix's last block, in one
    step of 512; ids are of the vocabulary and those of the run alone."""
    setup = Setup(num_blocks=2100, block_size=16, max_num_batched_tokens=512, max_model_len=32_768)
    stage = Stage(setup)
    prefix = tuple(7 * i % 61 + 1 for i in range(31_990))
    first, *others = [make_request(f"r{i:02}", (*prefix, *range(i + 1, i + 11)), 3, seed=i) for i in range(13)]
    stage.add(first)
    stage.run()
    stage.add(*others)
    assert rows_of(stage.step()) == {request.request_id: 16 for request in others}
    stage.run()
    assert stage.tokens["r07"] == solo(others[6], setup)
    assert all(0 <= token < VOCAB_SIZE for tokens in stage.tokens.values() for token in tokens)


def test_a_hit_and_a_neighbour_that_grows_in_the_same_step_take_different_blocks() -> None:
    """The neighbour needs a block, and those that nobody holds are the hit's: it takes one that the hit does not need,
    or there is no hit on it any more."""
    hits = set()
    for num_blocks in range(6, 12):
        setup = Setup(num_blocks=num_blocks, block_size=4, watermark=0.0, max_model_len=28)
        stage = Stage(setup)
        grows = make_request("grows", 15, 9, salt=9, arrival_time=0.5)
        stage.add(make_request("first", 13, 1))
        stage.run()
        stage.add(grows)
        stage.step()
        again = make_request("again", 13, 5, arrival_time=stage.now)
        stage.add(again)
        stage.run()
        assert {name: stage.tokens[name] for name in ("grows", "again")} == {
            "grows": solo(grows, setup), "again": solo(again, setup)}
        hits.add(again.num_cached_tokens)
    assert {0, 12} <= hits, hits


@pytest.mark.parametrize("num_prompt_tokens", [4, 8, 9, 16, 32])
def test_an_exact_repeat_gives_equal_tokens(num_prompt_tokens: int) -> None:
    stage = Stage(Setup())
    stage.add(make_request("a", num_prompt_tokens, 6))
    stage.run()
    stage.add(make_request("b", num_prompt_tokens, 6))
    stage.run()
    assert stage.tokens["a"] == stage.tokens["b"]
    first_row = next(row for plan in stage.plans for row in plan.rows if row.request_id == "b")
    assert first_row.num_computed_tokens == (num_prompt_tokens - 1) // 4 * 4
    assert first_row.num_computed_tokens + first_row.num_tokens == num_prompt_tokens


def test_a_bad_request_changes_nothing() -> None:
    stage = Stage(Setup())
    stage.add(make_request("a"), make_request("n", num_choices=3))
    before = stage.scheduler.stats()
    for bad in (make_request("a"), make_request("n:2"), make_request("big", 500), make_request("none", ()),
                make_request("n0", num_choices=0)):
        with pytest.raises(RequestError):
            stage.add(bad)
    assert stage.scheduler.stats() == before
    stage.run()
    stage.add(make_request("a"))      # the id is free again: nobody else can mean the old one


def test_a_step_must_be_updated_before_the_next_and_only_once() -> None:
    stage = Stage(Setup())
    stage.add(make_request("a"))
    plan = stage.schedule()
    with pytest.raises(InvariantError):
        stage.scheduler.schedule(9.0)
    stage.update(plan)
    with pytest.raises(InvariantError):
        stage.update(plan)


@pytest.mark.parametrize("lie", [
    {"step_id": 7},
    {"rows": ()},
    {"rows": (RowResult("somebody", (3,)),)},
    {"rows": (RowResult("a"),)},                 # sampled, but no token
    {"transfers_done": (5,)},                    # never asked for
])
def test_a_result_that_does_not_answer_the_plan_stops_loudly(lie: dict) -> None:
    stage = Stage(Setup())
    stage.add(make_request("a"))
    plan = stage.schedule()
    truth = StepResult(plan.step_id, (RowResult("a", (3,)),))
    with pytest.raises((InvariantError, ValueError)):
        stage.scheduler.update(plan, replace(truth, **lie), 1.0)


def test_a_dynamic_ordering_is_asked_again_each_step() -> None:
    favourite = ["c"]

    def key(request, view):
        return (request.request_id not in favourite, request.request_id)

    ordering = Ordering(key, is_static=False)
    stage = Stage(Setup())
    view = stage.scheduler._view(0.0)
    queue = WaitQueue(ordering, stage.scheduler.ledger)
    for name in "abc":
        queue.push(make_request(name), view)
    assert queue.head(view).request_id == "c"
    favourite[0] = "b"
    view = stage.scheduler._view(1.0)
    assert queue.head(view).request_id == "b"
    queue.remove(queue.head(view))
    assert queue.head(view).request_id == "a"


def test_a_dynamic_ordering_looks_at_a_bounded_window() -> None:
    asked: list[str] = []

    def key(request, view):
        asked.append(request.request_id)
        return (request.request_id,)

    stage = Stage(Setup())
    view = stage.scheduler._view(0.0)
    queue = WaitQueue(Ordering(key, is_static=False), stage.scheduler.ledger)
    for i in range(1000):
        queue.push(make_request(f"r{i:04}"), view)
    queue.head(view)
    assert len(asked) == DYNAMIC_WINDOW


def test_a_long_static_queue_is_not_walked() -> None:
    asked = 0

    def key(request, view):
        nonlocal asked
        asked += 1
        return (request.arrival_time, request.request_id)

    stage = Stage(Setup())
    view = stage.scheduler._view(0.0)
    queue = WaitQueue(Ordering(key, is_static=True), stage.scheduler.ledger)
    requests = [make_request(f"r{i:04}", arrival_time=float(i)) for i in range(2000)]
    for request in requests:
        queue.push(request, view)
    for request in requests[1:1500]:
        queue.remove(request)           # aborted behind the head
    assert queue.head(view) is requests[0]
    queue.remove(requests[0])
    assert queue.head(view) is requests[1500]
    assert len(queue) == 500
    assert len(queue._picker._entries) <= 2 * 500 + 64
    assert asked == 2000


def test_policies_are_swapped_whole_between_steps() -> None:
    setup = Setup(max_num_seqs=1)
    stage = Stage(setup)
    requests = [make_request("a", 6, 3, arrival_time=0.0), make_request("b", 6, 3, arrival_time=1.0, salt=1),
                make_request("c", 6, 3, arrival_time=2.0, priority=-1, salt=2)]
    stage.add(*requests)
    stage.step()
    stage.switch(ordering="priority")
    stage.run()
    assert list(stage.finished) == ["a", "c", "b"]
    assert stage.tokens == {request.request_id: solo(request, setup) for request in requests}

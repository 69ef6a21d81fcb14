"""Cancelling at any moment: nothing is lost, nothing leaks, nobody else notices."""

from __future__ import annotations

from paceline.request import FinishReason

from ..fakes import Setup, Stage, make_request, solo


def test_abort_in_the_queue_twice_and_of_nobody() -> None:
    stage = Stage(Setup(max_num_seqs=1))
    stage.add(make_request("a"), make_request("b"), make_request("c"))
    stage.step()
    stage.abort("b")
    stage.abort("b", "stranger")
    assert stage.reasons == {"b": FinishReason.ABORT}
    stage.run()
    assert {name: len(tokens) for name, tokens in stage.tokens.items()} == {"a": 4, "b": 0, "c": 4}
    assert stage.scheduler.stats().num_waiting == 0


def test_a_running_request_gives_everything_back() -> None:
    stage = Stage(Setup())
    stage.add(make_request("a", 40, 50))
    for _ in range(5):
        stage.step()
    stage.abort("a")
    stats = stage.scheduler.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)
    assert not stage.scheduler.has_work()
    assert stage.finished["a"].timeline.finished_at == stage.now


def test_blocks_of_a_plan_in_flight_are_freed_only_after_its_update() -> None:
    setup = Setup(num_blocks=8, block_size=4)
    stage = Stage(setup)
    survivor = make_request("survivor", 9, 6, salt=1)
    stage.add(make_request("leaver", 9, 6), survivor)
    stage.step()
    plan = stage.schedule()
    num_free = stage.scheduler.stats().num_free_blocks
    stage.abort("leaver")
    assert stage.scheduler.stats().num_free_blocks == num_free
    stage.update(plan)
    assert stage.scheduler.stats().num_free_blocks > num_free
    assert stage.run().tokens["survivor"] == solo(survivor, setup)
    assert len(stage.tokens["leaver"]) == 1       # the token of the step in flight never came


def test_all_abort_while_their_step_runs() -> None:
    stage = Stage(Setup())
    stage.add(make_request("a"), make_request("b", num_choices=3))
    plan = stage.schedule()
    stage.abort("a", "b")
    assert not stage.scheduler.has_work()
    stage.update(plan)
    stats = stage.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert set(stage.reasons.values()) == {FinishReason.ABORT}
    assert set(stage.reasons) == {"a", "b", "b:1", "b:2"}


def test_an_id_may_come_again_and_a_late_abort_means_the_living_one_only_once() -> None:
    stage = Stage(Setup())
    stage.add(make_request("a"))
    stage.run()
    stage.abort("a")
    assert stage.reasons == {"a": FinishReason.LENGTH}
    stage.finished.clear()
    stage.tokens.clear()
    stage.add(make_request("a"))
    assert len(stage.run().tokens["a"]) == 4


def test_a_thousand_requests_with_cancels_leave_an_empty_engine() -> None:
    stage = Stage(Setup(num_blocks=60, max_num_seqs=32, max_num_batched_tokens=128, watermark=0.05))
    for i in range(1000):
        stage.add(make_request(f"r{i:04}", 1 + i % 17, 1 + i % 5, salt=i % 7, arrival_time=float(i)))
        if i % 10 < 3:
            stage.abort(f"r{i - i % 5:04}")
        if i % 3 == 0:
            stage.step()
    stage.run()
    stats = stage.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 60)
    assert len(stage.finished) == 1000
    scheduler = stage.scheduler
    leftovers = [scheduler._sampling_refs, scheduler._copies._copies, scheduler._deadlines._deadlines,
                 scheduler._choices._living, scheduler._choices._unborn, scheduler._choices._parent_of_unborn,
                 scheduler._counters._num_once_computed, scheduler.kv._prefix_cache._chains,
                 scheduler.kv._prefix_cache._computing, scheduler._kept.request_ids, scheduler._ended.in_flight,
                 scheduler._ended.padding]
    assert not any(leftovers)

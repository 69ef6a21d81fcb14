"""What the ledger books: every second that somebody waited, once, on what held the queue; and who held the blocks."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sched.ledger import MAX_TENANTS, OTHER, PREEMPTION, PUBLISH_SECONDS, STEP
from paceline.sched.reports import MAX_REMEMBERED, Ended, RequestReport, report_of, reports_of

from ..fakes import Setup, Stage, make_request


def queue_seconds(stage: Stage) -> dict[tuple[str, str], float]:
    return {(tenant, cause): seconds for tenant, cause, seconds in stage.scheduler.ledger.totals().queue_seconds}


def by_tenant(seconds: dict[tuple[str, str], float]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for (tenant, _), one in seconds.items():
        sums[tenant] += one
    return dict(sums)


def report(stage: Stage, name: str) -> RequestReport:
    (found,) = reports_of(stage.scheduler, [name], stage.now)
    return found


def test_the_limit_that_refuses_the_head_holds_all_who_wait() -> None:
    stage = Stage(Setup(max_num_seqs=1))
    stage.add(*(make_request(name, 5, 3, salt=index, tenant=tenant)
                for index, (name, tenant) in enumerate((("a", "x"), ("b", "y"), ("c", "y")))))
    stage.run()
    booked = queue_seconds(stage)
    assert booked["y", "max_num_seqs"] == (3.5 - 0.5) + (6.5 - 0.5)    # b starts at 3.5, c at 6.5
    assert booked["y", STEP] == 2 * 0.5 and booked["x", STEP] == 0.5   # all came half a second before the first plan
    assert ("x", "max_num_seqs") not in booked


ASKED = st.lists(st.tuples(st.integers(1, 18), st.sampled_from([1, 4, 12]), st.sampled_from("xyz"),
                           st.sampled_from([0.0, 0.3, 2.7])), min_size=1, max_size=8)


@given(asked=ASKED, num_blocks=st.sampled_from([8, 12, 60]), max_num_seqs=st.sampled_from([1, 3]),
       aborted_at=st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_a_tenants_seconds_are_those_its_requests_waited(
    asked: list[tuple[int, int, str, float]], num_blocks: int, max_num_seqs: int, aborted_at: int
) -> None:
    stage = Stage(Setup(num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=32))
    waited: dict[str, float] = defaultdict(float)
    entered: dict[str, float] = {}

    def look() -> None:
        """Who waits now that did not, and who does no more; tenants by name."""
        waiting = {request.request_id: request for request in stage.scheduler.waiting}
        for name in entered.keys() - waiting.keys():
            waited[name[0]] += stage.now - entered.pop(name)
        for name in waiting.keys() - entered.keys():
            entered[name] = stage.now

    for index, (num_tokens, max_tokens, tenant, late) in enumerate(asked):
        name = f"{tenant}{index}"
        stage.add(make_request(name, num_tokens, max_tokens, salt=index, tenant=tenant, arrival_time=stage.now + late))
        entered[name] = stage.now + late
    for step in range(300):
        if step == aborted_at:
            stage.abort(f"{asked[0][2]}0")
            look()
        if not stage.scheduler.has_work():
            break
        plan = stage.schedule()
        look()
        stage.update(plan)
        look()
    booked = by_tenant(queue_seconds(stage))
    assert {tenant: booked.get(tenant, 0.0) for tenant in waited} == pytest.approx(dict(waited))


def test_blocks_are_booked_while_they_are_held() -> None:
    stage = Stage(Setup(block_size=4))
    stage.add(make_request("a", 6, 4, tenant="x"))
    stage.run()
    booked = {(tenant, phase): seconds for tenant, phase, seconds in stage.scheduler.ledger.totals().block_seconds}
    # A step lasts 0.5 s and the next begins 0.5 s after it; decode comes 1.0 s after the first plan.
    assert booked["x", "prefill"] == 2 * (0.5 + 0.5) and booked["x", "decode"] == 2 * 1.0 + 2 * 1.0 + 3 * 0.5
    stage.now += 100.0
    stage.add(make_request("b", 1, 1, tenant="x", arrival_time=stage.now))
    stage.run()
    assert sum(seconds for *_, seconds in stage.scheduler.ledger.totals().block_seconds) < 10.0    # idle time is free


def test_tenants_beyond_the_first_share_an_account() -> None:
    stage = Stage(Setup(max_num_seqs=1))
    stage.add(*(make_request(f"r{index}", 3, 1, salt=index, tenant=f"t{index}") for index in range(MAX_TENANTS + 9)))
    stage.run()
    tenants = {tenant for tenant, _ in queue_seconds(stage)}
    assert len(tenants) == MAX_TENANTS + 1 and OTHER in tenants and f"t{MAX_TENANTS}" not in tenants


def test_totals_come_once_a_second_and_at_the_end() -> None:
    stage = Stage(Setup())
    ledger = stage.scheduler.ledger
    ledger.pass_time(5.0)
    assert ledger.totals_if_due(is_idle=False) is not None
    ledger.pass_time(5.0 + PUBLISH_SECONDS / 2)
    assert ledger.totals_if_due(is_idle=False) is None
    assert ledger.totals_if_due(is_idle=True) is not None
    ledger.pass_time(6.0 + PUBLISH_SECONDS)
    assert ledger.totals_if_due(is_idle=False) is not None


def test_a_request_that_waits_knows_what_for_and_behind_whom() -> None:
    stage = Stage(Setup(max_num_seqs=1))
    stage.add(*(make_request(name, 5, 30, salt=index, arrival_time=index / 10) for index, name in enumerate("abc")))
    stage.step()
    stage.step()
    told = report(stage, "c")
    assert told.status == "waiting" and told.hold is not None and told.prefill_seconds is None
    assert (told.hold.cause, told.hold.head_id, told.hold.position) == ("max_num_seqs", "b", 1)
    assert (told.hold.needed, told.hold.available) == (1, 0)
    assert told.hold.seconds == 2.0 - 0.5                         # since the first plan
    assert told.queue_seconds == pytest.approx(2.0 - 0.2) and told.predicted_start_seconds is None
    running = report(stage, "a")
    assert (running.status, running.num_output_tokens, running.num_blocks, running.hold) == ("running", 2, 2, None)
    assert reports_of(stage.scheduler, ["nobody", "a"], stage.now) == (running,)


def test_what_a_preemption_cost_is_told_to_its_victim() -> None:
    stage = Stage(Setup(num_blocks=6, block_size=4, prefix_cache="none"))
    stage.add(make_request("a", 8, 12, arrival_time=0.0), make_request("b", 8, 12, arrival_time=0.1, salt=1))
    while not stage.num_preemptions:
        stage.step()
    told = report(stage, "b")
    assert (told.status, told.num_blocks, told.num_computed_tokens) == ("preempted", 0, 0)
    assert told.hold is not None and told.hold.cause == PREEMPTION
    num_lost = stage.plans[-1].preempted[0].num_lost_tokens
    stage.run()
    told = report(stage, "b")
    assert (told.status, told.finish_reason, told.num_preemptions) == ("finished", "length", 1)
    assert told.num_recomputed_tokens == num_lost == stage.scheduler.stats().num_recomputed_tokens
    assert report(stage, "a").num_recomputed_tokens == 0


def test_a_start_is_predicted_from_how_the_queue_moved() -> None:
    stage = Stage(Setup(max_num_seqs=1))
    stage.add(*(make_request(f"r{index:02}", 3, 2, salt=index, arrival_time=index / 100) for index in range(20)))
    while len(stage.finished) < 8:
        stage.step()
    told = report(stage, "r19")
    assert told.hold is not None and told.predicted_start_seconds is not None
    predicted = stage.now + told.predicted_start_seconds
    while report(stage, "r19").status == "waiting":
        stage.step()
    assert stage.now == pytest.approx(predicted, abs=2.0)


def test_only_so_many_ends_are_remembered() -> None:
    ended = Ended()
    for index in range(MAX_REMEMBERED + 3):
        ended.note(make_request(f"r{index}", 2), 1.0)
    assert ended.find("r2") is None and ended.find("r3") is not None
    assert ended.find("r3") == report_of(make_request("r3", 2), 0, 1.0)

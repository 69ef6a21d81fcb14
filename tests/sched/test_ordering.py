"""Who is served first, whom that can keep waiting, and for how long at most."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import RequestError
from paceline.kv.manager import KVCacheManager
from paceline.request import FinishReason, Request, RequestStatus
from paceline.sched.admission import ADMISSIONS, prefill_room
from paceline.sched.batching import REGIMES
from paceline.sched.chunking import CHUNKINGS
from paceline.sched.forecast import seconds_to_serve, seconds_to_wait, would_end_late
from paceline.sched.gate import GATES
from paceline.sched.observed import MOST_TENANTS, TenantService
from paceline.sched.ordering import ORDERINGS
from paceline.sched.plan import Refusal
from paceline.sched.preemption import PREEMPTIONS, VICTIM_RULES
from paceline.sched.view import SchedulerView
from paceline.sched.wait_queue import DYNAMIC_WINDOW, WaitQueue

from ..fakes import Setup, Stage, make_request, solo

QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None)
ASKED = st.fixed_dictionaries({
    "prompt": st.lists(st.integers(1, 2), min_size=1, max_size=20).map(tuple), "max_tokens": st.integers(1, 8),
    "priority": st.integers(0, 3), "tenant": st.sampled_from(["a", "b", "c"]),
    "timeout": st.sampled_from([None, 1.0, 5.0, 30.0]), "num_steps_before": st.integers(0, 3)})
WORKLOADS = st.lists(ASKED, min_size=3, max_size=14)


def starts(stage: Stage, workload: list[dict]) -> Iterator[tuple[Request, list[Request]]]:
    """Every first start, with those that were waiting then."""
    asked = list(workload)
    while asked or stage.scheduler.has_work():
        if asked:
            one = asked.pop(0)
            name, now = f"r{len(asked):02}", stage.now
            at = None if one["timeout"] is None else now + one["timeout"]
            try:
                stage.add(make_request(name, one["prompt"], one["max_tokens"], salt=len(asked), arrival_time=now,
                                       priority=one["priority"], tenant=one["tenant"], deadline=at))
            except RequestError as refusal:
                assert refusal.code == "deadline_infeasible"
        for _ in range(one["num_steps_before"] if asked else 1):
            waited = list(stage.scheduler.waiting)
            started = {row.request_id for row in stage.step().rows}
            left = [r for r in waited if r.request_id not in started and r.status is RequestStatus.WAITING]
            for request in waited:
                if request.request_id in started and request.num_preemptions == 0:
                    yield request, left


def most_passed_by(ordering: str, allowed: Callable[[Request, Request], float], **knobs: object) -> Callable[[], None]:
    """A property: whoever starts came less than `allowed` seconds after each one it leaves waiting."""
    @QUICK
    @given(workload=WORKLOADS, max_num_seqs=st.integers(1, 3), prefix_cache=st.sampled_from(["none", "hash"]))
    def property(workload: list[dict], max_num_seqs: int, prefix_cache: str) -> None:
        stage = Stage(Setup(ordering=ordering, max_num_seqs=max_num_seqs, prefix_cache=prefix_cache, knobs=knobs,
                            max_model_len=40))
        for request, left in starts(stage, workload):
            for passed in left:
                assert request.arrival_time - passed.arrival_time <= allowed(request, passed)
    return property


def test_under_fcfs_nobody_is_passed() -> None:
    most_passed_by("fcfs", lambda request, passed: 0.0)()


def test_priority_inversion_is_bounded() -> None:
    """Nobody less urgent starts while a more urgent request waits; the time it waits is that of those running."""
    most_passed_by("priority", lambda request, passed: float("inf") if request.priority < passed.priority
                   else 0.0 if request.priority == passed.priority else -1e-9)()


def test_an_urgent_request_waits_for_one_to_end_and_not_for_two() -> None:
    stage = Stage(Setup(ordering="priority", max_num_seqs=2))
    stage.add(*(make_request(f"r{i}", 5, 8 + 4 * i, salt=i, arrival_time=float(i)) for i in range(6)))
    stage.step()
    stage.add(make_request("urgent", 5, 2, salt=9, arrival_time=7.0, priority=-1))
    while "urgent" not in {row.request_id for row in stage.step().rows}:
        pass
    assert stage.finished.keys() == {"r0"}


def test_with_aging_a_level_of_priority_is_worth_so_many_seconds() -> None:
    most_passed_by("priority", lambda request, passed: 3.0 * (passed.priority - request.priority),
                   priority_aging_seconds=3.0)()


def test_a_short_prompt_passes_only_who_came_shortly_before() -> None:
    most_passed_by("shortest_prompt", lambda request, passed:
                   (passed.num_prompt_tokens - request.num_prompt_tokens) / 4.0, aging_tokens_per_second=4.0)()


def test_longest_prefix_starves_nobody() -> None:
    """A prefix of the whole context is worth 40 / 4 seconds of waiting."""
    most_passed_by("longest_prefix", lambda request, passed: 40 / 4.0, aging_tokens_per_second=4.0)()


@pytest.mark.parametrize(("ordering", "knob"), [("shortest_prompt", "aging_tokens_per_second"),
                                                ("longest_prefix", "aging_tokens_per_second"),
                                                ("priority", "priority_aging_seconds")])
def test_waiting_that_counts_ends_what_would_be_starvation(ordering: str, knob: str) -> None:
    """Favourites keep coming, one a step; without aging the one in disfavour comes last."""
    def num_favourites_before(value: float) -> int:
        stage = Stage(Setup(ordering=ordering, max_num_seqs=1, knobs={knob: value}))
        stage.add(make_request("warm", 12, 1))
        stage.run()
        stage.add(make_request("slow", 16, 1, salt=5, priority=9, arrival_time=stage.now))
        for i in range(60):
            stage.add(make_request(f"f{i}", 13, 1, arrival_time=stage.now))
            stage.step()
        stage.run()
        return list(stage.finished).index("slow") - 1

    never, soon = (1e6, 0.5) if ordering == "priority" else (0.001, 4.0)
    assert num_favourites_before(never) == 60
    assert num_favourites_before(soon) < 10


def test_a_burst_of_equal_prefixes_runs_family_by_family() -> None:
    """Three long prefixes in turn on a pool that holds one of them: in order of arrival each evicts the next one's."""
    def num_computed(ordering: str) -> int:
        setup = Setup(ordering=ordering, num_blocks=14, max_num_seqs=1, knobs={"aging_tokens_per_second": 1.0})
        stage = Stage(setup)
        requests = [make_request(f"r{i}", (*range(3 * (i % 3), 3 * (i % 3) + 40), 50 + i), 4, arrival_time=i / 100)
                    for i in range(12)]
        stage.add(*requests)
        stage.run()
        assert stage.tokens == {request.request_id: solo(request, setup) for request in requests}
        return stage.scheduler.stats().num_prompt_tokens_computed

    assert num_computed("fcfs") == 12 * 41
    assert num_computed("longest_prefix") == 3 * 41 + 9


def test_a_preempted_request_is_looked_at_before_newcomers() -> None:
    stage = Stage(Setup())
    view = stage.scheduler._view(0.0)
    queue = WaitQueue(ORDERINGS["longest_prefix"], stage.scheduler.ledger)
    for i in range(2 * DYNAMIC_WINDOW):
        queue.push(make_request(f"r{i:03}", arrival_time=1.0), view)
    victim = make_request("victim", arrival_time=0.0)
    victim.status = RequestStatus.PREEMPTED
    queue.push(victim, view)
    assert queue.head(view) is victim


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_an_abort_storm_leaves_the_rest_in_order(ordering: str) -> None:
    setup = Setup(ordering=ordering, max_num_seqs=4, num_blocks=40)
    stage = Stage(setup)
    requests = [make_request(f"r{i:03}", 4 + i % 9, 3, salt=i, arrival_time=i / 1000, priority=i % 4,
                             tenant=f"t{i % 7}") for i in range(300)]
    stage.add(*requests)
    stage.step()
    for i in range(299, -1, -1):
        if i % 10:
            stage.abort(f"r{i:03}")
        if i % 50 == 0:
            stage.step()
    stage.run()
    ended = [name for name, reason in stage.reasons.items() if reason is FinishReason.LENGTH]
    assert {f"r{i:03}" for i in range(0, 300, 10)} <= set(ended)
    assert stage.tokens["r290"] == solo(requests[290], setup)
    stats = stage.scheduler.stats()
    assert (len(stage.finished), stats.num_waiting, stats.num_free_blocks) == (300, 0, 40)


# ---- fair

def service_gaps(ordering: str, workload: list[dict], seqs: int, weights: dict[str, float]) -> tuple[float, float]:
    """The widest range of the difference of service between a and b while both wait; and the bound, 2 U."""
    texts = ",".join(f"{tenant}={weight}" for tenant, weight in weights.items())
    stage = Stage(Setup(ordering=ordering, max_num_seqs=seqs, prefix_cache="none", max_num_batched_tokens=24,
                        knobs={"tenant_weights": texts, "fair_input_weight": 1.0, "fair_output_weight": 2.0}))
    requests = {f"r{i:03}": make_request(f"r{i:03}", one["prompt"], one["max_tokens"], tenant=one["tenant"],
                                         arrival_time=float(i)) for i, one in enumerate(workload)}
    stage.add(*requests.values())
    served = {"a": 0.0, "b": 0.0, "c": 0.0}
    differences = [0.0]
    while {"a", "b"} <= {request.tenant for request in stage.scheduler.waiting}:
        before = {name: len(tokens) for name, tokens in stage.tokens.items()}
        for row in stage.step().rows:
            request = requests[row.request_id]
            num_prompt = min(row.num_computed_tokens + row.num_tokens, request.num_prompt_tokens)
            num_output = len(stage.tokens.get(row.request_id, ())) - before.get(row.request_id, 0)
            tokens = max(num_prompt - row.num_computed_tokens, 0) + 2.0 * num_output
            served[request.tenant] += tokens / weights.get(request.tenant, 1.0)
        if {"a", "b"} <= {request.tenant for request in stage.scheduler.waiting}:
            differences.append(served["a"] - served["b"])
    most_output = seqs * max(one["max_tokens"] for one in workload)
    longest = max(len(one["prompt"]) for one in workload)
    return max(differences) - min(differences), 2 * (longest + 2.0 * most_output) / min(1.0, *weights.values())


@QUICK
@given(workload=st.lists(ASKED, min_size=20, max_size=60), seqs=st.integers(1, 4),
       weights=st.sampled_from([{"a": 1.0}, {"a": 3.0}, {"a": 0.5, "b": 2.0}]))
def test_the_service_of_two_tenants_that_wait_differs_by_no_more_than_the_bound(
        workload: list[dict], seqs: int, weights: dict[str, float]) -> None:
    gap, bound = service_gaps("fair", workload, seqs, weights)
    assert gap <= bound


def flood(num_of_a: int, num_of_b: int) -> list[dict]:
    one = {"prompt": (1,) * 8, "max_tokens": 4}
    return [one | {"tenant": "a"}] * num_of_a + [one | {"tenant": "b"}] * num_of_b


def test_in_order_of_arrival_a_flood_of_one_tenant_breaks_that_bound() -> None:
    gap, bound = service_gaps("fcfs", flood(40, 40), 2, {"a": 1.0})
    assert gap > 10 * bound
    gap, bound = service_gaps("fair", flood(40, 40), 2, {"a": 1.0})
    assert gap <= bound / 2


def order_of_starts(stage: Stage, requests: list[Request]) -> str:
    stage.add(*requests)
    stage.run()
    by_start = sorted(requests, key=lambda request: (request.first_scheduled_at, request.request_id))
    return "".join(request.tenant for request in by_start)


def of_tenant(tenant: str, num_requests: int, at: float) -> list[Request]:
    return [make_request(f"{tenant}{i:02}-{at}", 8, 4, tenant=tenant, arrival_time=at) for i in range(num_requests)]


def test_tenants_take_turns_and_a_weight_is_a_share() -> None:
    fair = Setup(ordering="fair", max_num_seqs=1, prefix_cache="none")
    assert order_of_starts(Stage(fair), of_tenant("a", 8, 0.0) + of_tenant("b", 4, 1.0)) == "ababababaaaa"
    thrice = replace(fair, knobs={"tenant_weights": "a=3"})
    assert order_of_starts(Stage(thrice), of_tenant("a", 8, 0.0) + of_tenant("b", 4, 1.0))[:8].count("a") == 6


def test_a_tenant_cannot_save_service_by_being_idle() -> None:
    stage = Stage(Setup(ordering="fair", max_num_seqs=1, prefix_cache="none"))
    stage.add(*of_tenant("a", 30, 0.0))
    for _ in range(80):
        stage.step()
    waiting = sum(1 for request in stage.scheduler.waiting)
    late = of_tenant("b", 10, stage.now)
    stage.add(*late)
    num_steps = 0
    while any(request.first_scheduled_at is None for request in late[:5]):
        stage.step()
        num_steps += 1
    served_meanwhile = waiting - sum(1 for request in stage.scheduler.waiting if request.tenant == "a")
    assert served_meanwhile in (4, 5)


def test_a_tenant_that_comes_alone_after_others_starts_where_they_stand() -> None:
    service, config = TenantService(), Setup()
    scheduler_config = Stage(config).scheduler.config
    running = make_request("r", 8, 4, tenant="a")
    service.charge(running, 100, 0, scheduler_config)
    service.settle(None, [running])
    assert service.of("new") == service.of("a") == 100.0
    service.settle(None, [])
    assert service.of("a") == service.of("new") == 0.0      # an idle engine owes nobody anything


def test_counters_of_tenants_long_gone_are_dropped() -> None:
    service, config = TenantService(), Stage(Setup()).scheduler.config
    for i in range(MOST_TENANTS + 100):
        service.charge(make_request("x", tenant=f"t{i}"), 1, 0, config)
    service.charge(make_request("x", tenant="busy"), 1000, 0, config)
    service.charge(make_request("x", tenant="waits"), 500, 0, config)
    service.settle("waits", [])
    assert service._served == {"busy": 1000.0}
    assert service.of("waits") == service.of("t3") == 500.0


def test_however_many_tenants_wait_few_are_looked_at() -> None:
    stage = Stage(Setup(ordering="fair", num_blocks=4000))
    stage.add(*(make_request(f"r{i:04}", 4, 4, tenant=f"t{i}", arrival_time=float(i)) for i in range(2000)))
    stage.step()
    queue, looked_at = stage.scheduler.waiting._picker, 0
    rank_of = queue._rank_of

    def counted(view):
        def rank(tenant):
            nonlocal looked_at
            looked_at += 1
            return rank_of(view)(tenant)
        return rank

    queue._rank_of = counted
    for request in list(stage.scheduler.waiting)[:1900]:
        stage.scheduler.abort((request.request_id,), 0.0)
    assert stage.scheduler.waiting.head(stage.scheduler._view(0.0)).request_id == "r1916"
    looked_at = 0
    for _ in range(20):
        stage.step()
    assert looked_at < 20 * 16 * 3


# ---- deadline

def measured(stage: Stage) -> Stage:
    """Eight requests have run: 0.01 s a step whatever is in it, 4 tokens each, 4 s from start to end by the clock."""
    stage.add(*(make_request(f"m{i}", 8, 4, salt=i, arrival_time=0.0) for i in range(8)))
    return stage.run()


def test_the_earliest_deadline_starts_first_and_none_comes_last() -> None:
    stage = Stage(Setup(ordering="deadline", max_num_seqs=1))
    stage.add(make_request("none", arrival_time=0.0), make_request("late", arrival_time=1.0, deadline=90.0),
              make_request("soon", arrival_time=2.0, deadline=50.0))
    stage.run()
    assert list(stage.finished) == ["soon", "late", "none"]


def test_an_engine_that_has_measured_nothing_refuses_nobody() -> None:
    stage = Stage(Setup(ordering="deadline"))
    stage.add(make_request("a", deadline=0.001))


def test_an_infeasible_deadline_is_refused_at_the_door_with_the_predicted_wait() -> None:
    stage = measured(Stage(Setup(ordering="deadline", max_num_seqs=2)))
    pace = stage.scheduler.observations.pace
    stage.add(*(make_request(f"r{i}", 8, 4, salt=20 + i, arrival_time=stage.now) for i in range(4)))
    stage.step()
    before = stage.scheduler.stats()
    wait = pace.request_seconds / 2
    with pytest.raises(RequestError, match=rf"^timeout: 0.5 s cannot be kept; .* wait {wait:.3g} s and") as told:
        stage.add(make_request("x", 8, 4, salt=30, arrival_time=stage.now, deadline=stage.now + 0.5))
    assert (told.value.param, told.value.code) == ("timeout", "deadline_infeasible")
    assert stage.scheduler.stats() == before
    stage.add(make_request("x", 8, 4, salt=30, arrival_time=stage.now, deadline=stage.now + wait + 1.0))
    stage.run()


def test_those_ahead_count_and_those_behind_do_not() -> None:
    stage = measured(Stage(Setup(ordering="deadline", max_num_seqs=2)))
    stage.add(*(make_request(f"r{i}", 8, 4, salt=20 + i, arrival_time=stage.now, deadline=stage.now + 1e3 + i)
                for i in range(8)))
    stage.step()
    view, ordering = stage.scheduler._view(stage.now), ORDERINGS["deadline"]
    each = view.observations.pace.request_seconds / 2
    for deadline, num_ahead in ((stage.now + 1.0, 0), (stage.now + 2e3, 6)):
        request = make_request("x", 8, 4, arrival_time=stage.now, deadline=deadline)
        assert seconds_to_wait(view, request, ordering) == pytest.approx((num_ahead + 1) * each)


@QUICK
@given(workload=WORKLOADS, max_num_seqs=st.integers(1, 3), seconds=st.sampled_from([0.01, 0.4, 2.0]))
def test_deadline_starts_nothing_infeasible(workload: list[dict], max_num_seqs: int, seconds: float) -> None:
    """Whatever steps cost, whoever starts could still end in time by what was known then; the rest ends by TIMEOUT."""
    stage = Stage(Setup(ordering="deadline", max_num_seqs=max_num_seqs))
    collect = stage.executor.collect
    stage.executor.collect = lambda plan: replace(collect(plan), duration_seconds=seconds)
    known: dict[int, tuple] = {}
    schedule = stage.scheduler.schedule

    def checked(now: float):
        late = {r.request_id for r in stage.scheduler.waiting if would_end_late(stage.scheduler._view(now), r)}
        plan = schedule(now)
        known[plan.step_id] = (late, {row.request_id for row in plan.rows})
        return plan

    stage.scheduler.schedule = checked
    for _ in starts(stage, workload):
        pass
    assert all(not late & started for late, started in known.values())
    assert set(stage.reasons.values()) <= {FinishReason.LENGTH, FinishReason.TIMEOUT}


# ---- gates

def waiting_behind(num_running: int, num_waiting: int, **knobs: object) -> Stage:
    stage = Stage(Setup(gate="waiting_served", knobs=knobs))
    stage.add(*(make_request(f"r{i}", 4, 60, salt=i) for i in range(num_running)))
    stage.step()
    stage.add(*(make_request(f"w{i}", 4, 4, salt=50 + i, arrival_time=1.0) for i in range(num_waiting)))
    return stage


def test_the_gate_opens_when_enough_wait_for_those_who_run() -> None:
    stage = waiting_behind(10, 2, waiting_served_ratio=0.3)
    assert stage.step().refusal == Refusal("w0", "waiting_served_ratio", needed=3, available=2)
    stage.add(make_request("w2", 4, 4, salt=52, arrival_time=1.0))
    assert stage.step().num_running == 13


def test_the_gate_opens_when_a_few_have_waited_for_long_enough() -> None:
    stage = waiting_behind(10, 1, waiting_served_ratio=0.3, max_waiting_tokens=5)
    num_closed = 0
    while stage.step().refusal is not None:
        num_closed += 1
    assert num_closed == 5
    assert stage.plans[-1].num_running == 11


def test_the_gate_is_open_when_nobody_runs() -> None:
    stage = Stage(Setup(gate="waiting_served", knobs={"waiting_served_ratio": 9.0}))
    stage.add(make_request("a"))
    assert stage.step().num_running == 1
    stage.run()


def test_prompts_are_prefilled_up_to_a_limit_and_a_longer_one_alone() -> None:
    stage = Stage(Setup(prefix_cache="none", knobs={"max_batch_prefill_tokens": 20}))
    stage.add(*(make_request(f"r{i}", length, 4, salt=i, arrival_time=float(i))
                for i, length in enumerate((12, 8, 30, 4))))
    first, second, third = (stage.step() for _ in range(3))
    assert first.refusal == Refusal("r2", "max_batch_prefill_tokens", needed=30, available=0)
    assert second.refusal == Refusal("r3", "max_batch_prefill_tokens", needed=4, available=0)
    assert (first.num_running, second.num_running, third.num_running) == (2, 3, 4)


# ---- all

def state_of(stage: Stage) -> bytes:
    scheduler = stage.scheduler
    pool, requests = scheduler.kv.pool, [*scheduler.running, *scheduler.waiting]
    fields = [[getattr(request, name) for name in Request.__slots__] for request in requests]
    batch = (scheduler._batch.num_members, scheduler._batch.is_open)
    return pickle.dumps((fields, pool.free_order(), pool._refs, pool._hash_of, scheduler.observations, batch))


def answers(view: SchedulerView, kv: KVCacheManager) -> list[object]:
    """What every policy says to this view."""
    waiting, requests = list(view.waiting), [*view.running, *view.waiting]
    said: list[object] = [gate(view, one) for gate in GATES.values() for one in waiting]
    said += [rule(view, one, kv.look_up(one)) for rule in (*ADMISSIONS.values(), prefill_room) for one in waiting]
    said += [key(one, view) for o in ORDERINGS.values() for key in (o.key, o.running_key) for one in requests]
    said += [lanes(view)(one.tenant) for o in ORDERINGS.values() if (lanes := o.lanes) for one in requests]
    said += [(seconds_to_serve(view, one), would_end_late(view, one)) for one in requests]
    said += [seconds_to_wait(view, one, ordering) for ordering in ORDERINGS.values() for one in requests]
    said += [rule(view, view.running).request_id for rule in VICTIM_RULES.values() if view.running]
    said += [rule(view, one) for rule in PREEMPTIONS.values() for one in view.running]
    said += [(regime.may_join(view), regime.opens_at(view)) for regime in REGIMES.values()]
    said += [chunking.budget(view) for chunking in CHUNKINGS.values()]
    said += [chunking.share(view, wanted, left, behind) for chunking in CHUNKINGS.values()
             for wanted, left, behind in ((1, 9, 3), (20, 9, 3), (20, 64, 0))]
    return said


@QUICK
@given(workload=WORKLOADS, num_blocks=st.sampled_from([14, 100]), ordering=st.sampled_from([*ORDERINGS]))
def test_policies_are_pure_functions_of_the_view(workload: list[dict], num_blocks: int, ordering: str) -> None:
    stage = Stage(Setup(num_blocks=num_blocks, max_num_seqs=3, max_model_len=40, ordering=ordering,
                        knobs={"max_batch_prefill_tokens": 9}))
    for _ in starts(stage, [one | {"timeout": None} for one in workload]):
        view, kv = stage.scheduler._view(stage.now), stage.scheduler.kv
        before = state_of(stage)
        said, copied = answers(view, kv), deepcopy(view)
        assert said == answers(view, kv)
        assert said == answers(copied, copied.kv)    # nothing but the view was looked at
        assert state_of(stage) == before

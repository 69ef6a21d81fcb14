"""Admission by what may yet be needed: under reserve nobody is ever preempted, under overcommit few are."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kv.groups import FULL_ATTENTION, KVBudget, KVGroup
from paceline.request import Request, RequestStatus, StopMatch
from paceline.sched.observed import ALL, FEWEST_LENGTHS, MOST_CLASSES, MOST_LENGTHS, OutputLengths
from paceline.sched.ordering import ORDERINGS
from paceline.sched.plan import Refusal

from ..fakes import EOS, Setup, Stage, make_policies, make_request, solo

WINDOWS = [FULL_ATTENTION, (KVGroup(window=5),), (KVGroup(), KVGroup(window=3)),
           (KVGroup(), KVGroup(window=6), KVGroup(window=6))]
ROOMS = st.builds(
    Setup, num_blocks=st.integers(9, 30), block_size=st.sampled_from([2, 4]), max_num_seqs=st.sampled_from([16, 4]),
    max_num_batched_tokens=st.sampled_from([64, 9, 3]), max_model_len=st.just(40),
    ordering=st.sampled_from([*ORDERINGS]),
    prefix_cache=st.sampled_from(["none", "hash"]), eos_token_ids=st.sampled_from([frozenset(), frozenset({EOS, 5})]),
    transfer_delay=st.sampled_from([0, 1, 3]), groups=st.sampled_from(WINDOWS), admission=st.just("reserve"))
ASKED = st.lists(st.fixed_dictionaries({
    "prompt": st.lists(st.integers(1, 2), min_size=1, max_size=20).map(tuple), "max_tokens": st.integers(1, 30),
    "num_choices": st.sampled_from([1, 1, 2, 3, 5]), "tenant": st.sampled_from(["a", "b"]),
    "priority": st.integers(0, 2), "num_steps_before": st.integers(0, 6),
    "fate": st.sampled_from(["", "", "fork", "abort"]),
}), min_size=2, max_size=8)


def play(setup: Setup, workload: list[dict]) -> Stage:
    """Requests that come over time, of which some are forked and some aborted while they run."""
    stage = Stage(setup)
    for i, asked in enumerate(workload):
        prompt = asked["prompt"][: stage.scheduler.max_model_len - 1]
        stage.add(make_request(f"r{i}", prompt, asked["max_tokens"], seed=i, arrival_time=stage.now,
                               **{name: asked[name] for name in ("num_choices", "tenant", "priority")}))
        for _ in range(asked["num_steps_before"]):
            stage.step()
        for parent in [r for r in stage.scheduler.running if asked["fate"] == "fork" and r.num_output_tokens][:1]:
            child = make_request(f"f{i}", parent.token_ids(0, parent.num_tokens), 9, arrival_time=stage.now)
            if child.num_tokens < stage.scheduler.max_model_len:
                stage.scheduler.fork(parent.request_id, child)
                stage.scheduler.check()
        if asked["fate"] == "abort":
            stage.abort(f"r{i // 2}")
    return stage.run()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(setup=ROOMS, workload=ASKED)
def test_who_starts_under_reserve_is_never_preempted(setup: Setup, workload: list[dict]) -> None:
    """With forks and choices, prefix hits, windows, copies that land late, ends before the limit, and aborts."""
    assert play(setup, workload).num_preemptions == 0


def test_the_same_workloads_preempt_without_a_reservation() -> None:
    """So the property above can fail."""
    preempting = 0

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(setup=ROOMS, workload=ASKED)
    def count(setup: Setup, workload: list[dict]) -> None:
        nonlocal preempting
        setup.admission = "watermark"
        preempting += play(setup, workload).num_preemptions > 0

    count()
    assert preempting > 10


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(setup=ROOMS, workload=ASKED, num_steps=st.integers(1, 20))
def test_after_a_switch_to_reserve_only_those_from_before_are_preempted(
        setup: Setup, workload: list[dict], num_steps: int) -> None:
    setup.admission = "watermark"
    stage = Stage(setup)
    for i, asked in enumerate(workload):
        prompt = asked["prompt"][: stage.scheduler.max_model_len - 1]
        stage.add(make_request(f"r{i}", prompt, asked["max_tokens"], seed=i))
    for _ in range(num_steps):
        if stage.scheduler.has_work():
            stage.step()
    stage.scheduler.switch_policies(make_policies(ordering=setup.ordering, admission="reserve"))
    from_before = {request.request_id for request in stage.scheduler.running}
    while stage.scheduler.has_work():
        plan = stage.step()
        assert {victim.request_id for victim in plan.preempted} <= from_before
        from_before -= {victim.request_id for victim in plan.preempted}


def test_one_huge_max_tokens_does_not_keep_small_ones_out_for_ever() -> None:
    """Whoever asks for the whole context has the pool alone, in its turn; the ones before and after it are all served,
    and a stop long before the limit gives everything back."""
    huge = make_request("huge", 6, 54, arrival_time=1.0)
    ends_with = solo(huge, Setup(max_model_len=60))[9]
    setup = Setup(num_blocks=16, block_size=4, max_model_len=60, admission="reserve",
                  eos_token_ids=frozenset({ends_with}))
    stage = Stage(setup)
    small = [make_request(f"s{i}", 6, 4, salt=i + 1, arrival_time=2.0 * i, ignore_eos=True) for i in range(6)]
    stage.add(huge, *small)
    first = stage.step()
    assert [row.request_id for row in first.rows] == ["s0"]
    assert first.refusal == Refusal("huge", "num_kv_blocks", needed=15, available=13)
    stage.run()
    starts = {name: output.timeline.first_scheduled_at for name, output in stage.finished.items()}
    assert starts["s0"] < starts["huge"] < min(starts[f"s{i}"] for i in range(1, 6))
    assert len(stage.tokens["huge"]) <= 10
    assert stage.num_preemptions == 0
    assert stage.tokens == {request.request_id: solo(request, setup) for request in (huge, *small)}


def test_a_shared_prefix_is_reserved_once() -> None:
    stage = Stage(Setup(num_blocks=12, block_size=4, admission="reserve"))
    stage.add(make_request("first", 24, 4))
    stage.run()
    stage.add(make_request("a", 24, 4, arrival_time=1.0), make_request("b", 24, 4, seed=1, arrival_time=1.0))
    assert [row.request_id for row in stage.step().rows] == ["a", "b"]    # 5 shared, 2 of its own each
    assert stage.run().num_preemptions == 0


def test_all_choices_are_reserved_with_their_parent() -> None:
    stage = Stage(Setup(num_blocks=19, block_size=4, admission="reserve"))
    stage.add(make_request("n", 9, 12, num_choices=3), make_request("other", 9, 12, salt=1, arrival_time=1.0))
    refusal = stage.step().refusal
    assert refusal is not None and refusal.request_id == "other"    # 6 + 2 x 4 of 19 are spoken for
    assert stage.run().num_preemptions == 0


def test_choices_that_do_not_fit_together_start_one_by_one() -> None:
    setup = Setup(num_blocks=10, block_size=4, max_model_len=36, admission="reserve")
    stage = Stage(setup)
    stage.add(make_request("n", 8, 28, num_choices=4))
    assert stage.run(max_steps=300).num_preemptions == 0
    expected = {i: solo(make_request("x", 8, 28, choice_index=i), setup) for i in range(4)}
    assert {output.choice_index: stage.tokens[name] for name, output in stage.finished.items()} == expected


def chatty(name: str, number: int, at: float) -> Request:
    """Says it may take 64 tokens."""
    return make_request(name, 4, 64, salt=number, seed=number, arrival_time=at)


def run_until_told(stage: Stage, told: dict[str, int], max_steps: int = 4000) -> None:
    """A stop ends each request once it has as many tokens as told: what a model would decide."""
    for _ in range(max_steps):
        if not stage.scheduler.has_work():
            return
        ended = [r.request_id for r in stage.scheduler.running if r.num_output_tokens + 1 >= told[r.request_id]]
        plan = stage.schedule()
        result = stage.executor.collect(plan)
        stopped = [replace(row, stop=StopMatch(text=".")) if row.token_ids and row.request_id in ended else row
                   for row in result.rows]
        stage.note(stage.scheduler.update(plan, replace(result, rows=tuple(stopped)), stage.now))
        stage.scheduler.check()
    raise AssertionError("no end")


def test_before_anything_was_observed_overcommit_reserves() -> None:
    stage = Stage(Setup(num_blocks=20, block_size=4, admission="overcommit"))
    for i in range(3):
        stage.add(make_request(f"r{i}", 4, 40, salt=i, arrival_time=float(i)))
    plan = stage.step()
    assert [row.request_id for row in plan.rows] == ["r0"]
    assert plan.refusal == Refusal("r1", "num_kv_blocks", needed=11, available=9)


def test_overcommit_learns_how_long_outputs_are_and_lets_more_run() -> None:
    def most_running(admission: str) -> int:
        stage = Stage(Setup(num_blocks=40, block_size=4, admission=admission))
        told = {}
        for i in range(40):
            told[f"r{i}"] = 4
            stage.add(chatty(f"r{i}", i, float(i)))
        run_until_told(stage, told)
        assert stage.num_preemptions == 0
        return max(plan.num_running for plan in stage.plans)

    assert most_running("reserve") == 2
    assert most_running("overcommit") == 16


def test_outputs_that_turn_long_thrash_once_and_then_fewer_start() -> None:
    """Over-admission and its recovery: counted on 4 tokens, they take 48, so most of those running are preempted; as
    lengths are seen, those who start are fewer, and in the end nobody is preempted."""
    setup = Setup(num_blocks=40, block_size=4, admission="overcommit", knobs={"overcommit_quantile": 0.9})
    stage = Stage(setup)
    told: dict[str, int] = {}

    def wave(name: str, num_requests: int, length: int) -> int:
        before = stage.num_preemptions
        for i in range(num_requests):
            told[f"{name}{i}"] = length
            stage.add(chatty(f"{name}{i}", i, stage.now))
        run_until_told(stage, told)
        return stage.num_preemptions - before

    assert wave("short", 30, length=4) == 0
    thrash = wave("long", 30, length=48)
    assert thrash > 5
    assert wave("known", 30, length=48) <= thrash // 5
    assert wave("again", 30, length=48) == 0
    assert {name: len(tokens) for name, tokens in stage.tokens.items()} == told


def finished(num_tokens: int, tenant: str = "a", max_tokens: int = 100):
    request = make_request("x", 3, max_tokens, tenant=tenant)
    request.output_token_ids.extend([1] * num_tokens)
    return request


def test_the_expected_length_is_a_quantile_of_those_who_got_as_far() -> None:
    lengths = OutputLengths()
    for n in range(1, 101):
        lengths.note(finished(n))
    assert lengths.expected(finished(0), 0.9) == 90
    assert lengths.expected(finished(0), 0.5) == 50
    assert lengths.expected(finished(80), 0.5) == 90
    assert lengths.expected(finished(100), 0.5) is None


def test_each_class_has_its_own_lengths_and_too_few_say_nothing() -> None:
    lengths = OutputLengths()
    for _ in range(FEWEST_LENGTHS - 1):
        lengths.note(finished(50))
    assert lengths.expected(finished(0), 0.5) is None
    for _ in range(FEWEST_LENGTHS):
        lengths.note(finished(5, tenant="b"))
    assert lengths.expected(finished(0, tenant="b"), 1.0) == 5
    assert lengths.expected(finished(0, tenant="new"), 1.0) == 50          # all requests
    assert lengths.expected(finished(0, tenant="b", max_tokens=1000), 1.0) == 50


def test_old_lengths_and_classes_are_forgotten() -> None:
    lengths = OutputLengths()
    for _ in range(MOST_LENGTHS):
        lengths.note(finished(90))
    for _ in range(MOST_LENGTHS):
        lengths.note(finished(3))
    assert lengths.expected(finished(0), 1.0) == 3
    for i in range(2 * MOST_CLASSES):
        lengths.note(finished(3, tenant=f"t{i}"))
    assert len(lengths._recent) == MOST_CLASSES
    assert ALL in lengths._recent


def test_a_running_request_needs_no_more_than_the_budget_says() -> None:
    """What is reserved for one request alone is what the pool was measured with when it was accepted."""
    for groups in WINDOWS:
        stage = Stage(Setup(num_blocks=30, block_size=4, groups=groups, max_model_len=60, admission="reserve"))
        request = make_request("a", 20, 30)
        budget = KVBudget(30, 4, groups, stage.setup.max_num_batched_tokens)
        hit = stage.scheduler.kv.look_up(request)
        assert stage.scheduler.kv.num_blocks_to_reach(request, hit, 50) <= budget.blocks_needed(50)
        stage.add(request)
        stage.step()
        assert request.status is RequestStatus.RUNNING

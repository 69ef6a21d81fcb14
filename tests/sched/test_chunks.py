"""A step's token budget: prompts in pieces, decode beside them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from operator import mul

import pytest

from paceline.errors import ConfigError
from paceline.kv.groups import KVGroup
from paceline.sched.chunking import LEAST_PREFILL_TOKENS, beside_decode
from paceline.sched.step_time import features_of

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


# ---- whole


def test_a_whole_prompt_stalls_decode_for_its_step() -> None:
    stage = Stage(Setup(chunking="whole", max_num_batched_tokens=64))
    stage.add(*(make_request(f"d{i}", 4, 9, salt=i) for i in range(3)))
    stage.step()
    stage.add(make_request("long", 40, 3, salt=9, arrival_time=1.0))
    assert {row.request_id: row.num_tokens for row in stage.step().rows} == {"long": 40}
    assert {row.request_id: row.num_tokens for row in stage.step().rows} == dict.fromkeys(("d0", "d1", "d2", "long"), 1)


def test_prompts_share_a_step_as_long_as_they_fit_it_whole() -> None:
    stage = Stage(Setup(chunking="whole", max_num_batched_tokens=20))
    stage.add(*(make_request(f"r{i}", 8, 2, salt=i, arrival_time=float(i)) for i in range(3)))
    plan = stage.step()
    assert {row.request_id: row.num_tokens for row in plan.rows} == {"r0": 8, "r1": 8}
    assert plan.refusal is not None
    assert (plan.refusal.limit, plan.refusal.needed, plan.refusal.available) == ("max_num_batched_tokens", 8, 4)


def test_a_prompt_longer_than_the_budget_runs_whole_and_alone() -> None:
    stage = Stage(Setup(chunking="whole", max_num_batched_tokens=16))
    stage.add(make_request("long", 50, 2), make_request("short", 4, 2, salt=1, arrival_time=1.0))
    assert [row.num_tokens for row in stage.step().rows] == [50]
    assert [row.request_id for row in stage.step().rows] == ["short"]


def test_whole_prompts_are_refused_where_windows_were_sized_for_less() -> None:
    stage = Stage(Setup(groups=(KVGroup(), KVGroup(window=6)), max_num_batched_tokens=16))
    before = stage.scheduler.policies
    with pytest.raises(ConfigError, match=r"chunking: whole .* max_model_len=200 .* sized for 16"):
        stage.switch(chunking="whole")
    assert stage.scheduler.policies is before


# ---- bounded by the step-time model

MILLISECONDS = (3.0, 0.5, 0.0, 0.4, 0.0)    # what the steps of these stories take, by StepTime's terms




class Crowd:
    """Eight who decode, and long prompts that keep arriving beside them, in the time that steps and the host take."""

    def __init__(self, chunking: str, target_ms: float, cost: tuple[float, ...] = MILLISECONDS,
                 noise: Callable[[], float] = lambda: 1.0, host_ms: float = 0.0) -> None:
        self.stage = Stage(Setup(chunking=chunking, itl_target_ms=target_ms, max_num_batched_tokens=512,
                                 num_blocks=9000, max_model_len=4000))
        self.stage.is_timed = True
        self.stage.executor.seconds_of = lambda plan: sum(map(mul, cost, features_of(plan))) / 1e3 * noise()
        self.host_seconds = host_ms / 1e3
        self.stage.add(*(make_request(f"d{i}", 4, 3000, salt=i) for i in range(8)))
        self.waits_ms: list[float] = []    # of the decoders for each of their tokens, those of the first steps left out
        self.run(5)
        self.waits_ms.clear()

    def prompts(self, name: str, num_prompts: int, num_tokens: int = 900, **more: object) -> Crowd:
        for i in range(num_prompts):
            self.stage.add(make_request(f"{name}{i}", num_tokens, 1, arrival_time=self.stage.now,
                                        **{"salt": 20 + i} | more))    # type: ignore[arg-type]
            while f"{name}{i}" not in self.stage.finished:
                self.run(1)
            self.run(2)
        return self

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            before = self.stage.now
            self.stage.now += self.host_seconds
            self.stage.step()
            self.waits_ms.append(1e3 * (self.stage.now - before))

    @property
    def p99_ms(self) -> float:
        return sorted(self.waits_ms)[int(0.99 * len(self.waits_ms))]


def durations(chunking: str, target_ms: float) -> list[float]:
    """Steps in ms, in order of size."""
    crowd = Crowd(chunking, target_ms).prompts("p", 6)
    assert sum(1 for plan in crowd.stage.plans if plan.num_tokens > 8) > 3, "no prompt ran beside a decoder"
    return sorted(crowd.waits_ms)


def test_long_prefills_beside_decoders_hold_the_target_where_fixed_chunks_exceed_it_twice() -> None:
    target_ms = 40.0
    bounded, fixed = durations("itl_bounded", target_ms), durations("fixed", target_ms)
    assert bounded[int(0.99 * len(bounded))] <= 1.2 * target_ms
    assert fixed[-1] > 2 * target_ms


def test_the_bound_is_used_up() -> None:
    """Holding the target by doing nothing would be easy."""
    assert durations("itl_bounded", 40.0)[-3] > 0.8 * 40.0


def test_what_the_host_does_between_two_steps_counts() -> None:
    """9 ms of 40 that no executor sees: decoders wait for them all the same."""
    assert 0.9 * 40.0 < Crowd("itl_bounded", 40.0, host_ms=9.0).prompts("p", 6).p99_ms <= 1.05 * 40.0


@pytest.mark.parametrize("seed", [1, 2])
def test_the_target_is_held_where_equal_steps_do_not_take_equal_times(seed: int) -> None:
    rng = random.Random(seed)
    crowd = Crowd("itl_bounded", 40.0, noise=lambda: rng.lognormvariate(0.0, 0.1)).prompts("p", 8)
    assert crowd.p99_ms <= 1.2 * 40.0
    assert statistics.median(crowd.waits_ms) > 0.6 * 40.0, "held by doing next to nothing"


def test_a_machine_that_stalls_now_and_then_does_not_starve_prompts() -> None:
    """One step in twelve takes 100 ms more, whatever it runs: smaller chunks would help nobody."""
    rng, crowd = random.Random(0), Crowd("itl_bounded", 40.0)
    seconds_of = crowd.stage.executor.seconds_of
    crowd.stage.executor.seconds_of = lambda plan: seconds_of(plan) + 0.1 * (rng.random() < 1 / 12)
    crowd.prompts("p", 8)
    assert crowd.stage.scheduler.stats().step_time.overrun_seconds > 0.09
    assert max(plan.num_tokens for plan in crowd.stage.plans[-30:]) > 3 * LEAST_PREFILL_TOKENS


def test_a_token_behind_a_long_prefix_costs_more_and_is_priced_so() -> None:
    """The prefix comes from the cache, so the first chunk already stands behind 900 tokens."""
    dear_context = (3.0, 0.5, 0.0, 0.4, 0.0005)
    crowd = Crowd("itl_bounded", 40.0, dear_context).prompts("p", 4)
    crowd.waits_ms.clear()
    prefix = make_request("x", 900, salt=20).prompt_token_ids
    for i in range(3):
        crowd.stage.add(make_request(f"turn{i}", (*prefix, *range(i + 1, i + 200)), 1, arrival_time=crowd.stage.now))
    while len(crowd.stage.finished) < 7:
        crowd.run(1)
    assert crowd.stage.scheduler.stats().prefix_cache_hits == 3 * 900
    assert max(crowd.waits_ms) <= 1.2 * 40.0


def test_an_idle_engine_learns_nothing_of_its_idle_time() -> None:
    stage = Stage(Setup())
    stage.is_timed = True
    for i in range(8):
        stage.add(make_request(f"r{i}", 5, 4, salt=i, arrival_time=stage.now))
        stage.run()
        stage.now += 60.0
    features = features_of(stage.plans[-1])
    assert stage.scheduler.observations.step_time.predict(features) == pytest.approx(0.01, rel=0.01)


def test_the_first_chunks_beside_decoders_grow_step_by_step() -> None:
    """Decodes alone tell nothing of what a prompt costs."""
    stage = Stage(Setup(chunking="itl_bounded", itl_target_ms=1e6, max_num_batched_tokens=512, num_blocks=4000,
                        max_model_len=4000))
    stage.add(make_request("d", 1, 90))
    for _ in range(20):
        stage.step()
    stage.add(make_request("p", 900, 1, salt=1, arrival_time=stage.now))
    assert [stage.step().num_tokens - 1 for _ in range(5)] == [32, 64, 128, 256, 420]


def test_a_target_below_what_decode_takes_starves_no_prompt() -> None:
    """LEAST_PREFILL_TOKENS run all the same."""
    assert durations("itl_bounded", 5.0)[-1] < 3.0 + 8 * 0.5 + (LEAST_PREFILL_TOKENS + 17) * 0.4


def test_without_decoders_the_whole_budget_is_prefill() -> None:
    stage = Stage(Setup(chunking="itl_bounded", itl_target_ms=0.1, max_num_batched_tokens=64))
    stage.add(make_request("a", 150, 2))
    assert [stage.step().num_tokens for _ in range(2)] == [64, 64]


@pytest.mark.parametrize("chunking", ["whole", "itl_bounded"])
def test_no_chunking_changes_a_token(chunking: str) -> None:
    setup = Setup(chunking=chunking, max_num_batched_tokens=16, num_blocks=24)
    requests = [make_request(f"r{i}", 3 + 9 * i, 4 + 3 * i, salt=i % 3, seed=i, arrival_time=i / 4) for i in range(7)]
    stage = Stage(setup)
    stage.add(*requests)
    stage.run()
    assert stage.num_preemptions
    assert stage.tokens == {request.request_id: solo(request, setup) for request in requests}

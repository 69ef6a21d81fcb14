"""A request's bits depend on nothing but itself: not on chunks, neighbours, blocks, or what lies in free slots."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paceline.ops.cpu import CpuBackend
from paceline.runner.executor import ModelExecutor

from .helpers import BACKENDS, RANDOM, Generation, generate, kv_of, make_executor, prompt, row, tiny_spec
from .helpers import plan as plan_of

BLOCKS = (0, 1, 2, 3, 4, 5)
PROMPT = prompt(1, 70)


def story(name: str = "hero", block_ids: tuple[int, ...] = BLOCKS, **changes: object) -> Generation:
    return Generation(name, list(PROMPT), block_ids, **changes)    # type: ignore[arg-type]


MODELS = {
    "plain": tiny_spec(),
    "experts": tiny_spec(num_experts=5, experts_per_token=2, expert_intermediate_size=32, shared_intermediate_size=32,
                         has_renormalised_shares=True),
}
CPU_PATHS = [name.removeprefix("cpu-") for name in BACKENDS if name.startswith("cpu-")]
Make = Callable[..., ModelExecutor]


@pytest.fixture(params=[(backend, model) for model in MODELS for backend in BACKENDS], ids="-".join)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes executors of one path and one model; fields of the cache may be changed, and the form of the weights."""
    backend, spec = BACKENDS[request.param[0]], MODELS[request.param[1]]

    def made(dtype: str = "f32", kv_dtype: str = "bf16", **kv: int) -> ModelExecutor:
        return make_executor(kv_of(spec, dtype=kv_dtype, **kv), backend(), spec, dtype=dtype)
    return made


@pytest.fixture
def alone(make):    # type: ignore[no-untyped-def]
    """The outcome everything else must equal."""
    hero = story()
    generate(make(), [hero])
    assert len(set(hero.drawn)) > 1
    return hero.outcome


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33, 69])
def test_a_prompt_cut_into_chunks_forgets_nothing(make, alone, chunk) -> None:
    hero = story()
    generate(make(), [hero], chunk)
    assert hero.outcome == alone


@pytest.mark.parametrize("num_others", [1, 5, 16])
def test_neighbours_leave_no_trace(make, alone, num_others) -> None:
    hero = story()
    others = [Generation(f"other{i}", prompt(100 + i, 3 + 5 * i % 40), tuple(range(6 + 4 * i, 10 + 4 * i)), 3 + i)
              for i in range(num_others)]
    generate(make(num_blocks=80), [*others[:2], hero, *others[2:]], chunk=23)
    assert hero.outcome == alone


def test_blocks_may_lie_anywhere(make, alone) -> None:
    hero = story(block_ids=(31, 2, 17, 5, 39, 8))
    generate(make(), [hero], chunk=13)
    assert hero.outcome == alone


@pytest.mark.parametrize("block_size", [32, 64])
def test_block_size_does_not_matter(make, alone, block_size) -> None:
    hero = story(block_ids=(7, 3, 9))
    generate(make(block_size=block_size), [hero], chunk=40)
    assert hero.outcome == alone


@pytest.mark.parametrize("kv_dtype", ["bf16", "f32"])
def test_free_slots_may_hold_nan(make, kv_dtype) -> None:
    clean, poisoned = (make(kv_dtype=kv_dtype) for _ in range(2))
    poisoned._runner.poison(np.arange(40, dtype=np.int32))    # type: ignore[attr-defined]
    expected, hero = story(), story()
    generate(clean, [expected])
    generate(poisoned, [hero], chunk=9)
    assert hero.outcome == expected.outcome


def test_used_blocks_may_hold_another_requests_keys(make, alone) -> None:
    executor = make()
    generate(executor, [Generation("before", prompt(9, 90), BLOCKS, 4)])
    hero = story()
    generate(executor, [hero], chunk=31)
    assert hero.outcome == alone


def test_a_preempted_request_computes_the_same_again(make, alone) -> None:
    executor = make()
    hero = story(num_new=3)
    generate(executor, [hero])
    hero.num_computed, hero.block_ids, hero.num_new = 0, (20, 21, 22, 23, 24, 25), 6
    generate(executor, [hero], chunk=19)
    assert hero.outcome == alone


def test_a_shared_prefix_serves_two(make, alone) -> None:
    executor = make()
    first, hero = story("first"), story(block_ids=(0, 1, 2, 3, 14, 15), num_computed=64)    # 64 tokens: 4 whole blocks
    generate(executor, [first])
    generate(executor, [hero])
    assert hero.outcome == alone


def test_a_copied_block_is_read_in_the_same_step(make, alone) -> None:
    executor = make()
    generate(executor, [story("parent", num_new=1)])
    forked = (0, 1, 2, 3, 30, 5)
    hero = story(block_ids=forked, num_new=6)
    result = executor.collect(executor.submit(plan_of(row("hero", 69, PROMPT[69:], forked), copies=[(4, 30)])))
    assert result.transfers_done == (0,)
    assert list(result.rows[0].token_ids) == alone[0][:1]
    generate(executor, [hero])
    assert hero.outcome == alone


def test_copies_run_in_order(make) -> None:
    executor = make()
    once = row("a", 0, PROMPT[:40], (0, 1, 2))
    executor.collect(executor.submit(plan_of(once)))
    expected = executor.last_logits.tobytes()
    last = row("b", 39, PROMPT[39:40], (7, 8, 9))
    executor.submit(plan_of(last, copies=[(0, 7), (1, 5), (5, 8), (2, 9), (7, 5)]))
    assert executor.last_logits.tobytes() == expected


def test_sampling_depends_on_the_seed_alone(make) -> None:
    solo, mixed = story(params=RANDOM), story(params=RANDOM)
    generate(make(), [solo])
    other = Generation("other", prompt(3, 20), (10, 11), 5)
    generate(make(), [other, mixed], chunk=11)
    assert mixed.outcome == solo.outcome


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_packed_weights_are_as_exact(make, dtype) -> None:
    solo, mixed = story(num_new=3), story(num_new=3)
    generate(make(dtype), [solo])
    other = Generation("other", prompt(3, 20), (10, 11), 5)
    generate(make(dtype), [other, mixed], chunk=11)
    assert mixed.outcome == solo.outcome


@pytest.mark.parametrize("dtype", ["f32", "int4"])
@pytest.mark.parametrize("path", CPU_PATHS)
@pytest.mark.parametrize("model", MODELS)
def test_any_number_of_threads_gives_the_same(model, path, dtype) -> None:
    spec, outcomes = MODELS[model], []
    for num_threads in (1, 2, 3, 7):
        hero, other = story(), Generation("other", prompt(3, 20), (10, 11), 5)
        generate(make_executor(backend=CpuBackend(path, num_threads), spec=spec, dtype=dtype), [other, hero], 40)
        outcomes.append(hero.outcome)
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_dropping_the_executors_caches_changes_nothing(make, alone) -> None:
    executor = make()
    hero, other = story(), Generation("other", prompt(3, 20), (10, 11), 5)
    generate(executor, [other, hero], chunk=17, between_steps=executor.drop_caches)
    assert hero.outcome == alone

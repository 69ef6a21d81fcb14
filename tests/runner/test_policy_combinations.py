"""Sixty random combinations of policies, a random model of two layers, the real kernels: equal bits, clean books."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest

from paceline.sched.admission import ASSURING_ADMISSIONS
from tests.fakes import POLICY_TABLES, Setup

from .helpers import BACKENDS
from .test_with_scheduler import SPECS, outputs_of, workload

BACKEND = next(name for name in reversed(BACKENDS))    # the widest instruction set this machine has
NUM_COMBINATIONS = 60


def combination(seed: int) -> Setup:
    """Any names that go together, on a pool that is short in every second one."""
    rng = random.Random(seed)
    names = {kind: rng.choice(sorted(table)) for kind, table in POLICY_TABLES.items()}
    if names["preemption"] == "never":
        names["admission"] = rng.choice(sorted(ASSURING_ADMISSIONS))
    knobs = {"max_batch_prefill_tokens": rng.choice((None, 40)), "max_waiting_tokens": rng.choice((2, 20))}
    return Setup(num_blocks=(9, 60)[seed % 2], block_size=16, max_num_seqs=rng.choice((3, 16)),
                 max_num_batched_tokens=rng.choice((11, 64, 200)), prefix_cache=rng.choice(("none", "hash")),
                 batch_timeout_seconds=2.0, knobs=knobs, **names)


@lru_cache
def expected() -> dict[str, list[int]]:
    """Each request alone."""
    roomy = Setup(num_blocks=100, block_size=16, max_num_batched_tokens=1000, prefix_cache="none")
    alone: dict[str, list[int]] = {}
    for request in workload():
        alone |= outputs_of(roomy, [request], BACKEND)[0]
    return alone


@pytest.mark.parametrize("seed", range(NUM_COMBINATIONS))
def test_a_random_combination_of_policies_changes_no_token(seed: int) -> None:
    setup = combination(seed)
    tokens, stage = outputs_of(setup, workload(), BACKEND, SPECS["full"])
    assert tokens == expected()
    stats = stage.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, setup.num_blocks)
    if setup.preemption == "never":
        assert stage.num_preemptions == 0


def test_the_combinations_name_every_policy() -> None:
    drawn = [combination(seed) for seed in range(NUM_COMBINATIONS)]
    for kind, table in POLICY_TABLES.items():
        assert {getattr(setup, kind) for setup in drawn} == set(table), kind

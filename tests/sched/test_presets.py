"""Every preset shows its documented signature on one workload, and no two plan alike.

The workload discriminates: a burst on a cold engine, prompts with a common prefix, one of 5,000 tokens, one that
promises far more output than it gives, and a pool that holds half of it all.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache

import pytest

from paceline.presets import PRESETS
from paceline.sched.plan import SchedulerOutput

from ..fakes import Setup, Stage, make_request, solo

NUM_BLOCKS, BLOCK_SIZE = 350, 16
PREFIX = tuple(i % 43 + 1 for i in range(160))
LONG = 5000


def requests() -> list:
    """By arrival: 12 at once, then one a second. Every third brings the common prefix; ids are in order of arrival."""
    arrivals = []
    for i in range(34):
        own = tuple((5 * i + j) % 41 + 1 for j in range(40 + 53 * i % 400))
        prompt = (*PREFIX, *own) if i % 3 == 2 else own
        if i == 14:
            prompt = tuple(j % 47 + 1 for j in range(LONG))
        arrivals.append(make_request(f"r{i:02}", prompt, 20 + 17 * i % 80, seed=i, arrival_time=float(max(i - 11, 0))))
    return arrivals


def setup_of(name: str) -> Setup:
    preset = PRESETS[name]
    own = {declared.name for declared in fields(Setup)}
    named = {knob: value for knob, value in preset.scheduler.items() if knob in own}
    further = {knob: value for knob, value in preset.scheduler.items() if knob not in own}
    return Setup(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=6000,
                 prefix_cache=preset.cache["prefix_cache"], knobs=further, **named)


@lru_cache
def played(name: str) -> Stage:
    stage, coming = Stage(setup_of(name)), requests()
    while coming or stage.scheduler.has_work():
        while coming and coming[0].arrival_time <= stage.now:
            stage.add(coming.pop(0))
        stage.step()
    return stage


def stream(stage: Stage) -> tuple[object, ...]:
    return tuple((plan.rows, plan.padding, plan.preempted, plan.refusal) for plan in stage.plans)


def is_mixed(plan: SchedulerOutput) -> bool:
    sizes = {row.num_tokens > 1 for row in plan.rows}
    return sizes == {True, False}


def has_mixed_steps(stage: Stage) -> bool:
    return any(is_mixed(plan) for plan in stage.plans)


def largest_step(stage: Stage) -> int:
    return max(plan.num_tokens for plan in stage.plans)


def starts(stage: Stage) -> list[str]:
    """Ids in order of their first row."""
    return list(dict.fromkeys(row.request_id for plan in stage.plans for row in plan.rows))


def is_in_batches(stage: Stage) -> bool:
    """Nobody starts while one goes on that had its first token before the step before: a batch forms, then is closed."""
    first, first_token, last = {}, {}, {}
    for step, plan in enumerate(stage.plans):
        for row in plan.rows:
            first.setdefault(row.request_id, step)
            last[row.request_id] = step
            if row.sampling is not None:
                first_token.setdefault(row.request_id, step)
    return not any(first_token[other] < first[one] - 1 and last[other] >= first[one] for one in first for other in first)


def refused_by(stage: Stage) -> set[str]:
    return {plan.refusal.limit for plan in stage.plans if plan.refusal is not None}


def is_hit(stage: Stage) -> bool:
    return any(output.num_cached_tokens for output in stage.finished.values())


SIGNATURES = {
    "static": lambda s: is_in_batches(s) and any(p.padding for p in s.plans) and not has_mixed_steps(s)
    and not s.num_preemptions and all(p.rows for p in s.plans if p.num_waiting),
    "dynamic": lambda s: is_in_batches(s) and not any(p.padding for p in s.plans) and "regime" in refused_by(s)
    and not s.num_preemptions,
    "tgi": lambda s: "waiting_served_ratio" in refused_by(s) and not has_mixed_steps(s) and not s.num_preemptions
    and not is_in_batches(s) and starts(s) == sorted(starts(s)) and not is_hit(s),
    "vllm": lambda s: has_mixed_steps(s) and largest_step(s) == 2048 and s.num_preemptions and is_hit(s),
    "trtllm-no-evict": lambda s: has_mixed_steps(s) and largest_step(s) > 2048 and not s.num_preemptions
    and "num_kv_blocks" in refused_by(s) and is_hit(s),
    "trtllm-max-util": lambda s: has_mixed_steps(s) and largest_step(s) > 2048 and s.num_preemptions and is_hit(s),
    "sglang": lambda s: not has_mixed_steps(s) and starts(s) != sorted(starts(s)) and is_hit(s),
    "lmdeploy": lambda s: has_mixed_steps(s) and largest_step(s) > 2048 and s.num_preemptions and not is_hit(s),
    "fastgen": lambda s: largest_step(s) == 768 and has_mixed_steps(s) and s.num_preemptions and not is_hit(s),
    "paceline": lambda s: largest_step(s) == 512 and has_mixed_steps(s) and is_hit(s),
}


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_shows_its_signature(name: str) -> None:
    assert SIGNATURES[name](played(name))


def test_no_two_presets_plan_alike() -> None:
    streams = {name: stream(played(name)) for name in PRESETS}
    alike = [(one, other) for one in streams for other in streams if one < other and streams[one] == streams[other]]
    assert alike == []


def test_every_preset_has_a_signature_and_they_tell_presets_apart() -> None:
    assert SIGNATURES.keys() == PRESETS.keys()
    shown = {name: frozenset(other for other in PRESETS if SIGNATURES[name](played(other))) for name in PRESETS}
    assert all(name in others for name, others in shown.items())
    assert len(set(shown.values())) == len(PRESETS)


def test_all_presets_generate_the_same() -> None:
    expected = {request.request_id: solo(request, setup_of("paceline")) for request in requests()}
    for name in PRESETS:
        stage = played(name)
        assert stage.tokens == expected, name
        assert stage.scheduler.stats().num_free_blocks == NUM_BLOCKS, name

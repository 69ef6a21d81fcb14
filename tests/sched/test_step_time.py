"""The step-time model: learns what steps cost, never believes in negative costs, and says how far off it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sched.plan import ScheduledRequest, SchedulerOutput
from paceline.sched.step_time import (
    COEFFICIENTS,
    FEWEST_OVERRUNS,
    HELD_IN,
    MOST_MARGIN,
    MOST_OVERRUNS,
    StepTimeModel,
    features_of,
)

TRUE = dict(zip(COEFFICIENTS, (4e-3, 6e-4, 2e-7, 4e-4, 1e-7), strict=True))


def step(*rows: tuple[int, int]) -> SchedulerOutput:
    """Rows as (position of the first token, tokens)."""
    return SchedulerOutput(0, tuple(
        ScheduledRequest(str(i), start, (1,) * count, ((),), (), None) for i, (start, count) in enumerate(rows)))


MIXED = step((100, 1), (100, 1), (0, 50))    # a prompt beside decodes


def seconds(plan: SchedulerOutput) -> float:
    return sum(cost * feature for cost, feature in zip(TRUE.values(), features_of(plan), strict=True))


def mixed_steps(rng: random.Random, num_steps: int) -> list[SchedulerOutput]:
    """Decodes, now and then with a chunk of a prompt beside them."""
    steps = []
    for i in range(num_steps):
        rows = [(rng.randrange(20, 1500), 1) for _ in range(rng.randrange(1, 33))]
        if i % 3 == 0:
            rows.append((rng.choice((0, 0, 512, 1024)), rng.randrange(2, 512)))
        steps.append(step(*rows))
    return steps


def learned(steps: list[SchedulerOutput], noise=lambda: 1.0) -> StepTimeModel:
    model = StepTimeModel()
    for plan in steps:
        model.observe(plan, seconds(plan) * noise())
    return model


def test_it_predicts_steps_it_has_not_seen() -> None:
    rng = random.Random(1)
    model = learned(mixed_steps(rng, 300))
    for plan in mixed_steps(rng, 50):
        assert model.predict(features_of(plan)) == pytest.approx(seconds(plan), rel=0.05)


def test_noise_that_only_slows_steps_down_moves_it_little() -> None:
    """One step in ten takes five times as long, as on a machine shared with others."""
    rng = random.Random(2)
    model = learned(mixed_steps(rng, 300), lambda: 5.0 if rng.random() < 0.1 else 1.0)
    errors = [model.predict(features_of(plan)) / seconds(plan) for plan in mixed_steps(rng, 50)]
    assert 0.7 < sorted(errors)[len(errors) // 2] < 1.3


def test_no_cost_is_negative_even_where_the_steps_say_so() -> None:
    model = StepTimeModel()
    for count in (400, 300, 200, 100) * 10:
        model.observe(step((0, count)), 1.0 / count)
    assert min(model.coefficients) >= 0.0


def test_what_was_not_seen_for_long_is_still_known() -> None:
    rng = random.Random(3)
    model = learned(mixed_steps(rng, 200))
    before = model.predict(features_of(step((0, 256))))
    decodes = step(*((100, 1),) * 8)
    for _ in range(20_000):    # far past where forgetting has underflowed
        model.observe(decodes, seconds(decodes))
    assert model.predict(features_of(step((0, 256)))) == pytest.approx(before, rel=0.2)
    assert model.predict(features_of(decodes)) == pytest.approx(seconds(decodes), rel=0.01)


def test_the_error_it_exports_is_the_one_it_makes() -> None:
    rng = random.Random(4)
    exact, noisy = learned(mixed_steps(rng, 300)), learned(mixed_steps(rng, 300), lambda: rng.choice((0.8, 1.2)))
    assert exact.exported().relative_error < 0.05
    assert 0.1 < noisy.exported().relative_error < 0.35
    assert noisy.exported().num_observations == 300


@given(errors=st.lists(st.floats(-0.01, 0.5), min_size=FEWEST_OVERRUNS + 1, max_size=400))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_the_margin_covers_all_but_one_in_fifty_of_the_last_overruns(errors: list[float]) -> None:
    model = StepTimeModel()
    overruns = []
    for error in errors:
        before = model.predict(features_of(MIXED))
        model.observe(MIXED, 0.05 + error)
        overruns.append(0.05 + error - before)
    recent = overruns[1:][-MOST_OVERRUNS:]    # nothing was predicted before the first
    assert sum(one > model.overrun_seconds for one in recent) <= (1 - HELD_IN) * len(recent)
    assert model.margin_seconds(1.0) == min(model.overrun_seconds, MOST_MARGIN)
    assert model.margin_seconds(1e-3) <= MOST_MARGIN * 1e-3


def test_too_few_overruns_say_nothing_and_the_mean_error_stands_in() -> None:
    model = learned([step((100, 1))] * 40, iter([1.0, 1.1] * 20).__next__)
    for _ in range(FEWEST_OVERRUNS - 2):
        model.observe(MIXED, 3.0)
    assert model.overrun_seconds == model.exported().overrun_seconds == 0.0
    assert model.margin_seconds(0.05) == min(2 * model.relative_error, MOST_MARGIN) * 0.05 > 0.0


def test_the_largest_prefill_is_the_largest() -> None:
    model = learned(mixed_steps(random.Random(5), 300))
    for target in (0.02, 0.05, 0.1):
        num_tokens = model.largest_prefill(target, 8, 800, 256, 4096)
        decodes = ((100, 1),) * 8
        assert model.predict(features_of(step(*decodes, (256, num_tokens)))) <= target
        assert model.predict(features_of(step(*decodes, (256, num_tokens + 1)))) > target
    assert model.largest_prefill(0.001, 8, 800, 256, 4096) == 0
    assert model.largest_prefill(1e9, 8, 800, 256, 4096) == 4096


def test_steps_without_rows_or_duration_teach_nothing() -> None:
    model = StepTimeModel()
    model.observe(step(), 1.0)
    model.observe(step((0, 4)), 0.0)
    model.observe(step((0, 4)), float("nan"))
    assert model.exported().num_observations == 0

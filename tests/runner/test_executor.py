"""The executor's own promises: tickets, results, durations, failures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.clock import VirtualClock
from paceline.errors import InvariantError
from paceline.ops.interface import ForwardBatch, StepOutput
from paceline.request import SamplingParams
from paceline.runner.executor import ModelExecutor
from paceline.sched.plan import Executor, LastSampled, ScoredTokens

from .helpers import Generation, generate, kv_of, make_executor, plan, prompt, row, tiny_spec


class ScriptedRunner:
    """Draws what it is told, takes two virtual seconds."""

    def __init__(self, clock: VirtualClock, drawn: list[list[int]]) -> None:
        self.clock, self.drawn, self.batches, self.is_closed = clock, drawn, [], False

    def step(self, batch: ForwardBatch, wants_logits: bool = False) -> StepOutput:
        self.batches.append(batch)
        self.clock.advance(2.0)
        ids = np.array(self.drawn.pop(0), np.int32)
        return StepOutput(ids, np.full(len(ids), -0.5, np.float32), np.zeros((len(ids), 4)) if wants_logits else None)

    def close(self) -> None:
        self.is_closed = True


def scripted(*drawn: list[int]) -> tuple[ModelExecutor, ScriptedRunner]:
    clock = VirtualClock()
    runner = ScriptedRunner(clock, list(drawn))
    return ModelExecutor(runner, kv_of(tiny_spec()), clock), runner


def test_the_result_follows_the_plans_rows() -> None:
    executor, _ = scripted([5, 6, 7])
    quiet = SamplingParams(max_tokens=1)
    step = plan(row("a", 0, [1], (0,)), row("b", 0, [1, 2], (1,), params=None),
                row("c", 0, [1, 2], (2,), params=quiet, wants=(0, 1)), step_id=9, copies=[(3, 4)])
    result = executor.collect(executor.submit(step))
    assert (result.step_id, result.duration_seconds, result.transfers_done) == (9, 2.0, (0,))
    assert [(r.request_id, r.token_ids, r.logprobs) for r in result.rows] == [
        ("a", (5,), (-0.5,)), ("b", (), None), ("c", (6, 7), None)]


def test_a_step_may_be_planned_before_the_last_one_is_collected() -> None:
    executor, runner = scripted([5, 6], [7, 8])
    first = executor.submit(plan(row("a", 0, [1], (0,)), row("b", 0, [2], (1,))))
    executor.drop_caches()    # what is in flight is no cache
    second = executor.submit(plan(row("b", 1, [LastSampled.TOKEN], (1,)), row("a", 1, [LastSampled.TOKEN], (0,)),
                                  step_id=1))
    assert [r.token_ids for r in executor.collect(first).rows] == [(5,), (6,)]
    assert [r.token_ids for r in executor.collect(second).rows] == [(7,), (8,)]
    assert runner.batches[1].token_ids.tolist() == [6, 5]


def test_markers_and_ids_generate_the_same() -> None:
    hero = Generation("hero", prompt(4, 20), (0, 1), 4)
    generate(make_executor(), [hero])
    executor = make_executor()
    drawn = [*executor.collect(executor.submit(plan(row("hero", 0, hero.tokens[:20], (0, 1))))).rows[0].token_ids]
    for position in range(20, 23):
        step = plan(row("hero", position, [LastSampled.TOKEN], (0, 1)))
        drawn += executor.collect(executor.submit(step)).rows[0].token_ids
    assert drawn == hero.drawn


def test_logits_that_are_not_finite_fail_their_rows_only() -> None:
    executor, runner = scripted([5, -1, -1, 9], [1, 2])
    result = executor.collect(executor.submit(plan(*(row(name, 0, [1], (0,)) for name in "abcd"), step_id=3)))
    assert [one.token_ids for one in result.rows] == [(5,), (), (), (9,)]
    assert [one.failure for one in result.rows] == [None, "the model's logits are not finite",
                                                    "the model's logits are not finite", None]
    goes_on = plan(*(row(name, 1, [LastSampled.TOKEN], (0,)) for name in "ab"))
    result = executor.collect(executor.submit(goes_on))
    assert [one.failure for one in result.rows] == [None, "the step before this one drew no token"]
    assert runner.batches[-1].token_ids.tolist() == [5, 0]    # -1 is never fed to the model as a token


def test_a_poisoned_cache_fails_the_row_and_not_silently() -> None:
    executor = make_executor()
    executor._runner.poison(np.arange(40, dtype=np.int32))    # type: ignore[attr-defined]
    with np.errstate(invalid="ignore"):    # claims three tokens nobody computed
        result = executor.collect(executor.submit(plan(row("hero", 3, [1], (0,)), row("other", 0, [1, 2], (1,)))))
    assert [one.failure is None for one in result.rows] == [False, True]


def test_only_our_own_tickets() -> None:
    executor, _ = scripted()
    with pytest.raises(InvariantError, match="ticket"):
        executor.collect("something else")


def test_layout_and_close() -> None:
    executor, runner = scripted()
    contract: Executor = executor
    layout = contract.kv_layout()
    assert (layout.num_blocks, layout.block_size, layout.num_groups) == (40, 16, 1)
    assert layout.bytes_per_block == 2 * 2 * 2 * 16 * 2 * 16
    executor.close()
    assert runner.is_closed


def test_logits_are_kept_only_when_asked() -> None:
    executor, _ = scripted([1])
    executor.submit(plan(row("a", 0, [1], (0,))))
    assert executor.last_logits is None


def test_a_prompt_token_without_a_finite_score_fails_its_row() -> None:
    executor = make_executor()
    executor._runner.poison(np.arange(40, dtype=np.int32))    # type: ignore[attr-defined]
    scoring = replace(row("hero", 3, [1, 2], (0,), params=None, wants=()), scored=ScoredTokens(0, (2, 9), 0))
    calm = replace(row("calm", 0, [1, 2], (1,), params=None, wants=()), scored=ScoredTokens(0, (2, 9), 0))
    with np.errstate(invalid="ignore"):
        failed, fine = executor.collect(executor.submit(plan(scoring, calm))).rows
    assert failed.failure == "the model's logits are not finite" and failed.scored == ()
    assert fine.failure is None and [one.token_id for one in fine.scored] == [2, 9]

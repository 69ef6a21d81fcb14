"""The executor without a model: requests end where they should, time passes as predicted, and the schedule that comes
of it is one that `paceline replay` proves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.reproduce.lab import Cell, Lab, Ran, id_of, request
from paceline.build import build_policies, build_scheduler
from paceline.engine.messages import RequestOutput
from paceline.engine.replay import Journaled, Replay
from paceline.errors import ConfigError, InvariantError
from paceline.request import FinishReason
from paceline.sched.plan import KVLayout, SchedulerOutput, StepResult
from paceline.sched.step_time import COEFFICIENTS
from paceline.sim.cost_model import fitted
from paceline.sim.sim_executor import SimExecutor

ROOMY = {"num_blocks": 64, "block_size": 16, "max_model_len": 512}
PLAIN = Cell(name="cell", preset="paceline", knobs={"max_num_seqs": 2, "prefix_cache": "none"}, requests=(), **ROOMY)


def run(cell: Cell, output: Path | None = None, listeners: Any = ()) -> Ran:
    return Lab(build_scheduler, output).run(cell, listeners)



def test_a_request_takes_as_many_steps_as_it_has_output_tokens() -> None:
    ran = run(replace(PLAIN, requests=[request(0, 7), request(1, 3), request(2, 2)]))
    assert [(one.request_id, one.timeline.finished_at) for one in ran.finished if one.timeline] == [
        ("r00001", 3.0), ("r00002", 5.0), ("r00000", 7.0)]
    assert (ran.stats.num_steps, ran.seconds, ran.stats.num_generation_tokens) == (7, 7.0, 12)
    assert {one.finish_reason for one in ran.finished} == {FinishReason.LENGTH}


def test_a_length_that_the_scheduler_is_not_to_know_ends_in_the_models_own_way() -> None:
    asked = request(0, 400, (2,) * 10)
    asked = replace(asked, sampling=replace(asked.sampling, ignore_eos=False))
    ran = run(replace(PLAIN, requests=[asked], ends_at={id_of(0): 10 + 25 - 1}))
    assert ran.stats.num_generation_tokens == 25
    assert ran.finished[0].finish_reason is FinishReason.STOP


def test_arrivals_wait_for_their_time_and_idle_time_passes_at_once() -> None:
    ran = run(replace(PLAIN, requests=[request(1, 2, arrival_time=100.0), request(0, 3)]))
    assert [(one.request_id, one.timeline.finished_at) for one in ran.finished if one.timeline] == [
        ("r00000", 3.0), ("r00001", 102.0)]


def test_a_closed_loop_has_so_many_requests_at_once_and_no_more() -> None:
    class Crowd:
        most = 0

        def on_step(self, plan: SchedulerOutput, result: StepResult) -> None:
            self.most = max(self.most, plan.num_running + plan.num_waiting)

        def on_request_finished(self, output: RequestOutput) -> None:
            pass

    crowd = Crowd()
    cell = replace(PLAIN, requests=[request(number, 1 + number % 5) for number in range(20)], concurrency=3)
    assert len(run(cell, listeners=[crowd]).finished) == 20
    assert crowd.most == 3


def test_time_passes_as_the_cost_model_predicts() -> None:
    seconds = fitted((1.0, 0.25, 0.0, 0.5, 0.0))
    ran = run(replace(PLAIN, requests=[request(0, 3, (2,) * 8)], step_seconds=seconds))
    assert ran.seconds == (1.0 + 8 * 0.5) + 2 * (1.0 + 0.25)
    assert ran.stats.step_time.num_observations == 3    # durations are reported, and learned from


@pytest.mark.parametrize("coefficients", [(), (1.0, -0.1, 0, 0, 0), (0.0,) * 5, (float("nan"), 1, 1, 1, 1)])
def test_a_cost_model_that_makes_no_sense_is_refused(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=COEFFICIENTS[0]):
        fitted(coefficients)


def test_a_ticket_of_somebody_else_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="ticket"):
        SimExecutor(KVLayout(1, 16, 0), None).collect("mine")    # type: ignore[arg-type]


@pytest.mark.parametrize("preset", ["static", "dynamic", "tgi", "vllm", "sglang", "paceline"])
def test_the_journal_beside_a_result_proves_it(preset: str, tmp_path: Path) -> None:
    """Short of blocks, so that presets preempt or wait."""
    requests = [request(number, 20 + 7 * number % 40, tuple(range(9 * number, 9 * number + 30)))
                for number in range(12)]
    ran = run(Cell(name=preset, preset=preset, knobs={}, requests=requests, num_blocks=12, block_size=16,
                   max_model_len=128, step_seconds=fitted((0.01, 0.001, 0, 0.001, 0))), tmp_path)
    assert ran.journal is not None and len(ran.finished) == 12
    seen = Replay(Journaled.read(ran.journal), build_scheduler, build_policies).run()
    assert seen.difference is None
    assert seen.num_steps == ran.stats.num_steps


def test_the_same_run_writes_the_same_journal(tmp_path: Path) -> None:
    cell = replace(PLAIN, requests=[request(number, 5 + number) for number in range(6)])
    contents = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        contents.append(Path(run(cell, tmp_path / name).journal or "").read_bytes())
    assert contents[0] == contents[1]

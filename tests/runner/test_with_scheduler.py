"""The real scheduler over the real executor: every size of engine gives each request the bits of its solo run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.kv.groups import NULL_BLOCK
from paceline.model.spec import ModelSpec
from paceline.request import Request, SamplingParams
from tests.fakes import Setup, Stage

from .helpers import BACKENDS, groups_of, kv_of, make_executor, prompt, tiny_spec

SHARED = tuple(prompt(50, 37))


def workload() -> list[Request]:
    requests = []
    for i in range(9):
        head = SHARED if i % 2 else ()
        params = SamplingParams(max_tokens=4 + 5 * i % 11, temperature=(0.0, 0.8)[i % 3 > 0], top_p=0.9, seed=i)
        requests.append(Request(request_id=f"r{i}", prompt_token_ids=(*head, *prompt(60 + i, 3 + 7 * i % 30)),
                                sampling=params, arrival_time=float(i), num_choices=3 if i == 4 else 1))
    return requests


SPECS = {
    "full": tiny_spec(),
    "window": tiny_spec(windows=(20, 20)),
    "both": tiny_spec(num_layers=3, windows=(20, None, 9)),
}


def outputs_of(setup: Setup, requests: list[Request], backend_name: str,
               spec: ModelSpec = SPECS["full"]) -> tuple[dict[str, list[int]], Stage]:
    stage = Stage(replace(setup, groups=groups_of(spec)))
    kv = kv_of(spec, num_blocks=setup.num_blocks, block_size=setup.block_size)
    stage.executor = make_executor(kv, BACKENDS[backend_name](), spec)    # type: ignore[assignment]
    stage.add(*requests)
    while stage.scheduler.has_work():
        stage.step()
        stage.executor.drop_caches()
    return stage.tokens, stage


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("setup", [
    Setup(num_blocks=7, block_size=16),
    Setup(num_blocks=10, block_size=16, max_num_batched_tokens=5),
    Setup(num_blocks=100, block_size=16, max_num_batched_tokens=200),
    Setup(num_blocks=9, block_size=32, max_num_batched_tokens=23, prefix_cache="none"),
    Setup(num_blocks=20, block_size=16, max_num_seqs=2),
], ids=str)
def test_tokens_do_not_depend_on_the_size_of_the_engine(backend_name: str, setup: Setup) -> None:
    expected: dict[str, list[int]] = {}
    roomy = Setup(num_blocks=100, block_size=16, max_num_batched_tokens=1000, prefix_cache="none")
    for request in workload():
        expected |= outputs_of(roomy, [request], backend_name)[0]
    tokens, stage = outputs_of(setup, workload(), backend_name)
    assert tokens == expected
    if setup.num_blocks == 7:
        assert any(plan.preempted for plan in stage.plans)
    if setup.num_blocks == 100:
        assert any(plan.transfers for plan in stage.plans), "forks copy their last block"


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("kind", ["window", "both"])
@pytest.mark.parametrize("setup", [Setup(num_blocks=14, block_size=16, max_num_batched_tokens=11),
                                   Setup(num_blocks=100, block_size=32, max_num_batched_tokens=40),
                                   Setup(num_blocks=30, block_size=16, max_num_batched_tokens=64)], ids=str)
def test_windows_hold_in_every_size_of_engine(backend_name: str, kind: str, setup: Setup) -> None:
    spec, expected = SPECS[kind], {}
    roomy = Setup(num_blocks=300, block_size=16, max_num_batched_tokens=1000, prefix_cache="none")
    for request in workload():
        expected |= outputs_of(roomy, [request], backend_name, spec)[0]
    tokens, stage = outputs_of(setup, workload(), backend_name, spec)
    assert tokens == expected
    assert any(NULL_BLOCK in table for plan in stage.plans for row in plan.rows for table in row.block_ids)
    if setup.num_blocks == 14 and kind == "both":
        assert any(plan.preempted for plan in stage.plans)

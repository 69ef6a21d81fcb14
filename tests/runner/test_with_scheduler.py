"""The real scheduler over the real executor: every size of engine gives each request the bits of its solo run."""

from __future__ import annotations

import pytest

pytest.importorskip("paceline.sched.scheduler")    # lives on another branch until the merge
from paceline.request import Request, SamplingParams
from tests.fakes import Setup, Stage

from .helpers import BACKENDS, kv_of, make_executor, prompt, tiny_spec

SHARED = tuple(prompt(50, 37))


def workload() -> list[Request]:
    requests = []
    for i in range(9):
        head = SHARED if i % 2 else ()
        params = SamplingParams(max_tokens=4 + 5 * i % 11, temperature=(0.0, 0.8)[i % 3 > 0], top_p=0.9, seed=i)
        requests.append(Request(request_id=f"r{i}", prompt_token_ids=(*head, *prompt(60 + i, 3 + 7 * i % 30)),
                                sampling=params, arrival_time=float(i), num_choices=3 if i == 4 else 1))
    return requests


def outputs_of(setup: Setup, requests: list[Request], backend_name: str) -> tuple[dict[str, list[int]], Stage]:
    stage = Stage(setup)
    kv = kv_of(tiny_spec(), num_blocks=setup.num_blocks, block_size=setup.block_size)
    stage.executor = make_executor(kv, BACKENDS[backend_name]())    # type: ignore[assignment]
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

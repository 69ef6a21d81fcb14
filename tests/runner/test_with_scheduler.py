"""The real scheduler over the real executor: every size of engine gives each request the bits of its solo run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.kv.groups import NULL_BLOCK
from paceline.model.spec import ModelSpec
from paceline.request import FinishReason, Request, SamplingParams
from tests.fakes import Setup, Stage

from .helpers import BACKENDS, groups_of, kv_of, make_executor, prompt, random_weights, tiny_spec

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


def innocents(bad_token: int) -> list[Request]:
    return [replace(one, prompt_token_ids=tuple(token for token in one.prompt_token_ids if token != bad_token))
            for one in workload()]


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_rows_without_finite_logits_fail_and_change_nothing_for_the_others(backend_name: str) -> None:
    spec, bad_token = tiny_spec(has_tied_head=False, embedding_scale=8.0), 7
    weights = dict(random_weights(spec))
    weights["embed"].raw.view(np.float32)[bad_token] = 3e38    # a number, but scaled it is none
    guilty = [Request(request_id=f"bad{i}", prompt_token_ids=(*prompt(9, 20 + 10 * i), bad_token, 3),
                      sampling=SamplingParams(max_tokens=9), arrival_time=2.0 * i, num_choices=i) for i in (1, 2, 3)]

    def outcome(requests: list[Request]) -> Stage:
        stage = Stage(Setup(num_blocks=30, block_size=16, max_num_batched_tokens=19))
        stage.executor = make_executor(    # type: ignore[assignment]
            kv_of(spec, num_blocks=30), BACKENDS[backend_name](), spec, weights)
        stage.add(*requests)
        with np.errstate(invalid="ignore", over="ignore"):
            return stage.run()

    quiet, mixed = outcome(innocents(bad_token)), outcome([*guilty, *innocents(bad_token)])
    failed = {"bad1", "bad2", "bad2:1", "bad3", "bad3:1", "bad3:2"}
    assert mixed.reasons == quiet.reasons | dict.fromkeys(failed, FinishReason.ERROR)
    assert mixed.tokens == quiet.tokens | {name: [] for name in failed}
    assert mixed.scheduler.stats().num_free_blocks == 30


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


def test_a_prefix_of_32_000_tokens_is_reused_bit_for_bit() -> None:
    """Many requests behind one long prefix, on the fastest path of this machine: what reuse gives is what a request
    that computed all of it gives, and every id is one of the vocabulary."""
    spec, backend_name = tiny_spec(num_layers=1, max_position=32768), list(BACKENDS)[1 % len(BACKENDS)]
    prefix = tuple(prompt(50, 31_990))
    params = SamplingParams(max_tokens=3, temperature=0.8, seed=5, logprobs=0)

    def request(i: int) -> Request:
        return Request(request_id=f"r{i}", prompt_token_ids=(*prefix, *prompt(100 + i, 10)), sampling=params,
                       arrival_time=float(i))

    setup = Setup(num_blocks=2048, block_size=16, max_num_batched_tokens=2048, max_model_len=32_768)
    tokens, stage = outputs_of(setup, [request(i) for i in range(6)], backend_name, spec)
    assert stage.scheduler.stats().prefix_cache_hits == 5 * 31_984
    assert all(0 <= token < spec.vocab_size for row in tokens.values() for token in row)
    alone_tokens, alone = outputs_of(replace(setup, prefix_cache="none"), [request(4)], backend_name, spec)
    assert alone_tokens["r4"] == tokens["r4"]
    assert logprobs_of(alone, "r4") == logprobs_of(stage, "r4") != logprobs_of(stage, "r3")


def logprobs_of(stage: Stage, request_id: str) -> list[object]:
    return [output.logprobs for output in stage.outputs if output.request_id == request_id]

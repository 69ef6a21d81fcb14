"""Every sampling parameter at once, through the real scheduler and executor: alone, crowded, cut, preempted, found in
the prefix cache, with or without the executor's caches, tokens and log-probabilities are the same bits."""

from __future__ import annotations

import pytest

from paceline.request import Request, SamplingParams
from paceline.sched.outputs import RequestOutput
from tests.fakes import Setup, Stage

from .helpers import BACKENDS, kv_of, make_executor, prompt, tiny_spec

SHARED = tuple(prompt(50, 37))
ASKED: list[dict[str, object]] = [
    {"temperature": 0.0, "repetition_penalty": 1.8, "logprobs": 3},
    {"min_p": 0.05, "typical_p": 0.8, "prompt_logprobs": 2, "logprobs": 0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": ((3, 100.0), (9, 99.5)), "bad_words": ((3, 3), (9, 3, 9)), "logprobs": 20},
    {"allowed_token_ids": (5, 6, 7, 8, 80), "prompt_logprobs": 0, "top_k": 3},
    {"min_tokens": 5, "stop_token_ids": tuple(range(40)), "temperature": 1.9},
    {},
    {"temperature": 0.0, "prompt_logprobs": 20, "frequency_penalty": 2.0, "min_tokens": 2},
    {"repetition_penalty": 0.5, "bad_words": tuple((i, i + 1) for i in range(50)), "min_p": 0.01},
]

Seen = dict[str, tuple[list[int], list[object], list[object], list[object]]]


def workload() -> list[Request]:
    requests = []
    for i, asked in enumerate(ASKED):
        params = SamplingParams(max_tokens=4 + 5 * i % 11, seed=i, **asked)    # type: ignore[arg-type]
        head = SHARED if i % 2 else ()
        requests.append(Request(request_id=f"r{i}", prompt_token_ids=(*head, *prompt(60 + i, 3 + 7 * i % 30)),
                                sampling=params, arrival_time=float(i), num_choices=3 if i in (3, 4) else 1))
    return requests


def seen_in(outputs: list[RequestOutput]) -> Seen:
    seen: Seen = {}
    for output in outputs:
        tokens, logprobs, top, scores = seen.setdefault(output.request_id, ([], [], [], []))
        tokens += output.token_ids
        logprobs += output.logprobs or ()
        top += output.top_logprobs or ()
        scores += output.prompt_logprobs
    return seen


def run(setup: Setup, requests: list[Request], backend_name: str, drops_caches: bool = False) -> tuple[Seen, Stage]:
    stage = Stage(setup)
    kv = kv_of(tiny_spec(), num_blocks=setup.num_blocks, block_size=setup.block_size)
    stage.executor = make_executor(kv, BACKENDS[backend_name]())    # type: ignore[assignment]
    stage.add(*requests)
    while stage.scheduler.has_work():
        stage.step()
        if drops_caches:
            stage.executor.drop_caches()
    return seen_in(stage.outputs), stage


@pytest.fixture(scope="module", params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def alone(backend_name: str) -> Seen:
    expected: Seen = {}
    roomy = Setup(num_blocks=100, block_size=16, max_num_batched_tokens=1000, prefix_cache="none")
    for request in workload():
        expected |= run(roomy, [request], backend_name)[0]
    return expected


@pytest.mark.parametrize("drops_caches", [False, True])
@pytest.mark.parametrize("setup", [
    Setup(num_blocks=7, block_size=16),
    Setup(num_blocks=10, block_size=16, max_num_batched_tokens=5),
    Setup(num_blocks=100, block_size=16, max_num_batched_tokens=200),
    Setup(num_blocks=9, block_size=32, max_num_batched_tokens=23, prefix_cache="none"),
    Setup(num_blocks=20, block_size=16, max_num_seqs=2),
], ids=str)
def test_the_engine_leaves_no_trace(backend_name: str, alone: Seen, setup: Setup, drops_caches: bool) -> None:
    seen, stage = run(setup, workload(), backend_name, drops_caches)
    assert seen == alone
    if setup.num_blocks < 10:
        assert stage.num_preemptions > 0


def test_a_repeat_finds_its_prefix_and_says_the_same(backend_name: str, alone: Seen) -> None:
    setup = Setup(num_blocks=100, block_size=16)
    _, stage = run(setup, workload(), backend_name)
    num_before = len(stage.outputs)
    stage.finished.clear()
    stage.tokens.clear()
    stage.add(*workload())
    stage.run()
    assert seen_in(stage.outputs[num_before:]) == alone
    hits = {name: output.num_cached_tokens for name, output in stage.finished.items()}
    assert hits["r3"] > 0 and hits["r7"] == hits["r1"] == 0    # those are to score their prompts


def test_what_was_asked_is_what_came(alone: Seen) -> None:
    tokens, logprobs, top, scores = alone["r1"]
    assert len(logprobs) == len(tokens) and not top and len(scores) == len(workload()[1].prompt_token_ids) - 1
    assert all(len(one) == 20 for one in alone["r3"][2])
    assert set(alone["r4"][0]) <= {5, 6, 7, 8, 80}
    assert alone["r6"] == (alone["r6"][0], [], [], [])
    assert len(alone["r5"][0]) > 5 or alone["r5"][0][-1] >= 40
    for name in ("r3", "r3:1"):
        pairs = list(zip(alone[name][0], alone[name][0][1:], strict=False))
        assert 3 in alone[name][0] and (3, 3) not in pairs

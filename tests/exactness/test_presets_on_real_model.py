"""Every preset on the real model, on a roomy and a starved pool: each of 24 requests has the bits of its solo run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from paceline.build import LoadedModel, assemble, llm_around, load_model
from paceline.config import ModelConfig
from paceline.presets import PRESETS, engine_config
from paceline.request import Request, SamplingParams
from paceline.sched.outputs import EngineStats

NUM_REQUESTS = 24
ROOMY, STARVED = 400, 14    # blocks of 16 tokens; the longest request takes 7
SHARED = tuple(range(100, 140))


@dataclass(frozen=True)
class Played:
    tokens: dict[str, tuple[int, ...]]
    logprobs: dict[str, tuple[float, ...]]
    stats: EngineStats


def requests() -> list[Request]:
    """Greedy and drawn ones, every third with a common prefix of two blocks and a half."""
    made = []
    for i in range(NUM_REQUESTS):
        prompt = (*(SHARED if i % 3 == 0 else ()), *range(200 + 11 * i, 205 + 11 * i + 5 * i % 31))
        sampling = SamplingParams(max_tokens=3 + 7 * i % 24, temperature=(0.0, 0.9)[i % 2], top_p=0.95, seed=i,
                                  ignore_eos=True, logprobs=0)
        made.append(Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling, arrival_time=i / 1e3,
                            prompt_index=i))
    return made


def play(loaded: LoadedModel, preset: str, num_blocks: int, *, is_solo: bool = False) -> Played:
    config = engine_config(preset, {"num_kv_blocks": num_blocks, "block_size": 16})
    tokens: dict[str, tuple[int, ...]] = {}
    logprobs: dict[str, tuple[float, ...]] = {}
    with llm_around(assemble(loaded, config.cache, config.scheduler), ModelConfig()) as llm:
        for group in ([one] for one in requests()) if is_solo else [requests()]:
            for request in group:
                llm.core.scheduler.add(request)
            while llm.core.has_work():
                for output in llm.core.step().outputs:
                    tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
                    logprobs[output.request_id] = logprobs.get(output.request_id, ()) + (output.logprobs or ())
                llm.core.scheduler.check()
        return Played(tokens, logprobs, llm.core.scheduler.stats())


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    yield load_model(ModelConfig(max_model_len=512))


@pytest.fixture(scope="module")
def solo(loaded) -> Played:
    return play(loaded, "paceline", ROOMY, is_solo=True)


@pytest.mark.parametrize("num_blocks", [ROOMY, STARVED], ids=["roomy", "starved"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_gives_every_request_the_bits_of_its_solo_run(loaded, solo, preset: str, num_blocks: int) -> None:
    played = play(loaded, preset, num_blocks)
    assert (played.tokens, played.logprobs) == (solo.tokens, solo.logprobs)
    assert (played.stats.num_running, played.stats.num_waiting, played.stats.num_free_blocks) == (0, 0, num_blocks)
    preempts = engine_config(preset, {}).scheduler.preemption != "never"
    assert played.stats.num_preemptions == 0 or (preempts and num_blocks == STARVED)
    if preset in ("vllm", "trtllm-max-util", "lmdeploy", "fastgen") and num_blocks == STARVED:
        assert played.stats.num_preemptions > 0

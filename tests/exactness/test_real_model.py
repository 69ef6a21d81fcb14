"""Contract C1 on the real model: whatever the schedule does to a request, its tokens and log-probabilities are those of
its solo run, as bits. For every weight form, KV dtype and instruction-set path this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from paceline.build import LoadedModel, assemble, llm_around, load_model
from paceline.config import CacheConfig, ModelConfig, SchedulerConfig
from paceline.ops.cpu import CpuBackend, available_paths
from paceline.request import Request, SamplingParams

SHARED = ("A paceline is a line of riders who rotate through the front so that the whole group holds its speed. "
          "Nobody stays in the wind for long, and nobody is left behind. ")
PROMPTS = (
    "The capital of France is",
    SHARED + "The first rider",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, "
    "fifteen,",    # 30 tokens: crosses into a third block of 16 within four more
    SHARED + "The last rider",
)
FORMS = ("f32", "bf16", "int8", "int4")
PATHS = available_paths()


@dataclass(frozen=True)
class Run:
    """What a client can see of a run: tokens and log-probabilities (compared as exact floats)."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[object, ...]    # of each request all there are: its tokens', the best ones', its prompt's
    num_preemptions: int
    num_cached_tokens: int


def sampling(index: int, num_tokens: int) -> SamplingParams:
    """Greedy and drawn side by side, plain ones and such with everything: their rows must not touch each other."""
    plain = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    if index == 2:
        return replace(plain, repetition_penalty=1.3, frequency_penalty=0.2, bad_words=((198,), (28, 216)), logprobs=3,
                       prompt_logprobs=2)
    if index % 2 == 0:
        return plain
    drawn = replace(plain, temperature=0.9, top_k=40, top_p=0.95, seed=1000 + index)
    if index == 1:
        return drawn
    return replace(drawn, min_p=0.02, typical_p=0.9, presence_penalty=0.5, logit_bias=((28, -100.0),), min_tokens=2,
                   stop_token_ids=(30,))


@dataclass(frozen=True)
class Setup:
    loaded: LoadedModel
    num_tokens: int

    def run(self, prompts: tuple[str, ...] = PROMPTS, *, rounds: int = 1, is_solo: bool = False, block_size: int = 16,
            num_kv_blocks: int = 256, prefix_cache: str = "none", loaded: LoadedModel | None = None,
            **schedule: int) -> Run:
        """All prompts at once, or one after the other when solo; of several rounds the last is reported."""
        cache = CacheConfig(block_size=block_size, num_kv_blocks=num_kv_blocks, prefix_cache=prefix_cache)
        engine = assemble(loaded or self.loaded, cache, SchedulerConfig(**schedule))
        with llm_around(engine, ModelConfig()) as llm:
            for _ in range(rounds):
                done = []
                for group in ([prompt] for prompt in prompts) if is_solo else [list(prompts)]:
                    done += self._generate(llm, group, first_index=len(done))
            return Run(tuple(c.token_ids for c in done),
                       tuple((c.logprobs, c.top_logprobs, c.prompt_logprobs) for c in done),
                       sum(c.num_preemptions for c in done), sum(c.num_cached_tokens for c in done))

    def _generate(self, llm, group, first_index):
        submits = [llm._submit(index, prompt, 1, vars_of(sampling(index, self.num_tokens)))
                   for index, prompt in enumerate(group, first_index)]
        return llm._run(submits, show_progress=False)


def vars_of(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in SamplingParams.__slots__}    # what LLM takes, as it takes it


@pytest.fixture(scope="module", params=[(path, form) for path in PATHS for form in FORMS],
                ids=lambda pair: "-".join(pair))
def packed(request) -> Iterator[tuple[LoadedModel, int]]:
    path, form = request.param
    yield load_model(ModelConfig(dtype=form, isa=path, max_model_len=1024)), 4 if path == "portable" else 10


@pytest.fixture(scope="module", params=["bf16", "f32"])
def setup(request, packed) -> Setup:
    loaded, num_tokens = packed
    return Setup(replace(loaded, config=replace(loaded.config, kv_dtype=request.param)), num_tokens)


@pytest.fixture(scope="module")
def solo(setup) -> Run:
    return setup.run(is_solo=True, max_num_batched_tokens=2048)


def same(run: Run, solo: Run) -> bool:
    return (run.tokens, run.logprobs) == (solo.tokens, solo.logprobs)


def test_a_crowd_changes_nothing(setup, solo) -> None:
    assert same(setup.run(), solo)


@pytest.mark.parametrize("budget", [5, 16, 33])
def test_chunks_change_nothing(setup, solo, budget) -> None:
    assert same(setup.run(max_num_batched_tokens=budget), solo)


def test_preemption_changes_nothing(setup, solo) -> None:
    starved = setup.run(num_kv_blocks=6, watermark=0.0, max_num_batched_tokens=128)
    assert starved.num_preemptions > 0
    assert same(starved, solo)


def test_a_prefix_hit_changes_nothing(setup, solo) -> None:
    again = setup.run(rounds=2, prefix_cache="hash")
    assert again.num_cached_tokens > 0
    assert same(again, solo)


@pytest.mark.parametrize("block_size", [32, 64])
def test_block_size_changes_nothing(setup, solo, block_size) -> None:
    assert same(setup.run(block_size=block_size), solo)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_thread_count_changes_nothing(setup, solo, num_threads) -> None:
    backend = CpuBackend(setup.loaded.config.isa, num_threads)
    assert same(setup.run(loaded=replace(setup.loaded, backend=backend)), solo)


def test_a_fork_equals_the_choice_run_alone(setup) -> None:
    """Choices share prompt blocks by copy-on-write; each must equal a request that never shared anything."""
    params = replace(sampling(1, setup.num_tokens), top_k=None)
    cache = CacheConfig(num_kv_blocks=256, prefix_cache="none")
    with llm_around(assemble(setup.loaded, cache, SchedulerConfig()), ModelConfig()) as llm:
        submit = llm._submit(1, PROMPTS[1], 3, vars_of(params))
        together = llm._run([submit], show_progress=False)
        for completion in together:
            llm.core.scheduler.add(Request(
                request_id=f"alone-{completion.choice_index}", prompt_token_ids=submit.prompt_token_ids,
                sampling=params, arrival_time=0.0, prompt_index=1, choice_index=completion.choice_index))
            tokens: list[int] = []
            logprobs: list[float] = []
            while llm.core.has_work():
                for output in llm.core.step().outputs:
                    tokens += output.token_ids
                    logprobs += output.logprobs or ()
            assert (tuple(tokens), tuple(logprobs)) == (completion.token_ids, completion.logprobs)
    assert len({completion.token_ids for completion in together}) > 1

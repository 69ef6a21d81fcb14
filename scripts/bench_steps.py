"""Time of engine steps without HTTP: schedule, kernels, update, in this process. For docs/benchmarks.md.

    python scripts/bench_steps.py [MODEL] [--dtype int8] [--isa avx2] [--context 200]

A decode row is the median over steps in which exactly that many requests decode one token each. A prefill row is one
prompt in one step. Prompts are random token ids, so nothing is reused; the prefix cache is off. Contexts grow by 100
tokens while a row is measured: from 200 with one request and from 30 with more, or around what --context says.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator

from paceline.build import Engine, assemble, load_model
from paceline.config import CacheConfig, ModelConfig, SchedulerConfig
from paceline.engine.messages import Submit
from paceline.request import SamplingParams

PREFILL_TOKENS = 512
WARMUP = (1, 16, 20)    # requests, prompt tokens, output tokens
NUM_OUTPUT_TOKENS = 100
NUM_PROMPT_TOKENS = {1: 200, 8: 30, 16: 30, 32: 30}    # of so many requests
Step = tuple[int, float, float]


class Load:
    """Random prompts, and the steps they take."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._core = engine.core
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self._num_requests = 0

    def steps(self, num_requests: int, num_prompt_tokens: int, num_output_tokens: int) -> Iterator[Step]:
        """(tokens in the step, seconds in all, seconds in the executor) of every step until all have finished."""
        for _ in range(num_requests):
            prompt = tuple(self._rng.randrange(self._vocab_size) for _ in range(num_prompt_tokens))
            sampling = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
            self._core.add(Submit(request_id=str(self._num_requests), prompt_token_ids=prompt, sampling=sampling,
                                  arrival_time=0.0))
            self._num_requests += 1
        while self._core.has_work():
            started_at = time.perf_counter()
            outputs = self._core.step()
            yield outputs.step_num_tokens, time.perf_counter() - started_at, outputs.step_duration_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--context", type=int, help="tokens that a request has seen, on average; at least 51")
    arguments = parser.parse_args()
    config = ModelConfig(model=arguments.model, dtype=arguments.dtype, isa=arguments.isa, max_model_len=2048,
                         run_ahead="off")    # whole steps, each in its own time
    loaded = load_model(config)
    schedule = SchedulerConfig(max_num_batched_tokens=PREFILL_TOKENS)
    engine = assemble(loaded, CacheConfig(prefix_cache="none", num_kv_blocks=2048), schedule)
    load = Load(engine, loaded.files.spec.vocab_size)
    list(load.steps(*WARMUP))
    print(f"{loaded.fingerprint}\n\n| step | ms | of it in the executor | tokens/s |\n|---|---|---|---|")
    for num_rows, num_prompt_tokens in NUM_PROMPT_TOKENS.items():
        if arguments.context is not None:
            num_prompt_tokens = arguments.context - NUM_OUTPUT_TOKENS // 2
        steps = [step for step in load.steps(num_rows, num_prompt_tokens, NUM_OUTPUT_TOKENS) if step[0] == num_rows]
        report(f"decode, {num_rows} rows", num_rows, steps)
    steps = [step for _ in range(5) for step in load.steps(1, PREFILL_TOKENS, 1)]
    report(f"prefill, {PREFILL_TOKENS} tokens", PREFILL_TOKENS, steps)
    engine.close()


def report(name: str, num_tokens: int, steps: list[Step]) -> None:
    seconds, in_executor = (statistics.median(column) for column in list(zip(*steps, strict=True))[1:])
    print(f"| {name} | {1e3 * seconds:.2f} | {1e3 * in_executor:.2f} | {num_tokens / seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()

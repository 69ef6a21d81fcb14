"""Inter-token latency of decoders while long prompts keep arriving, by chunking. In this process, without HTTP.

    python scripts/bench_itl.py [MODEL] [--target-ms 50] [--decoders 8] [--prompt-tokens 1500]

The load is the same for each chunking: decoders that never stop, and prompts of random token ids, so nothing is reused;
the next prompt arrives a few steps after the one before has had its first token. An inter-token latency is the time
between two tokens of one decoder. The target should be well above a step of the decoders alone, which is printed first.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace

from paceline.build import Engine, LoadedModel, assemble, load_model
from paceline.config import CacheConfig, ModelConfig, SchedulerConfig
from paceline.engine import heap
from paceline.engine.messages import Submit
from paceline.request import SamplingParams

STEPS_BETWEEN = 5      # of decoders alone, after a prompt; they show how long it kept the decoders waiting
COLUMNS = ("chunking", "decode alone, ms", "ITL median", "p99", "largest", "p99 / target", "prompt tokens/s",
           "error of the model", "its overrun, ms")
ROUNDS_TO_LEARN = 2    # prompts before measuring: the step-time model starts without knowledge


class Load:
    """Decoders, and one prompt at a time beside them."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._core = engine.core
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self._num_requests = 0
        self._last_at: dict[str, float] = {}

    def submit(self, num_prompt_tokens: int, num_output_tokens: int) -> str:
        request_id = str(self._num_requests)
        self._num_requests += 1
        prompt = tuple(self._rng.randrange(self._vocab_size) for _ in range(num_prompt_tokens))
        sampling = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        self._core.add(Submit(request_id=request_id, prompt_token_ids=prompt, sampling=sampling,
                              arrival_time=float(self._num_requests)))
        return request_id

    def latencies_until(self, request_id: str | None, num_steps: int = 1 << 30) -> list[float]:
        """Times between tokens of all others, until this request has its first token or the steps are over."""
        found: list[float] = []
        for _ in range(num_steps):
            outputs = self._core.step().outputs
            now = time.perf_counter()
            for output in outputs:
                if output.request_id == request_id:
                    return found
                if output.request_id in self._last_at:
                    found.append(now - self._last_at[output.request_id])
                self._last_at[output.request_id] = now
        return found


def measure(loaded: LoadedModel, schedule: SchedulerConfig, arguments: argparse.Namespace) -> None:
    engine = assemble(loaded, CacheConfig(prefix_cache="none", num_kv_blocks=2048), schedule)
    load = Load(engine, loaded.files.spec.vocab_size)
    for _ in range(arguments.decoders):
        load.submit(16, loaded.max_model_len - 16)
    alone = load.latencies_until(None, 30)
    latencies: list[float] = []
    started_at = time.perf_counter()
    for i in range(ROUNDS_TO_LEARN + arguments.prompts):
        if i == ROUNDS_TO_LEARN:
            latencies, started_at = [], time.perf_counter()
        latencies += load.latencies_until(load.submit(arguments.prompt_tokens, 1))
        latencies += load.latencies_until(None, STEPS_BETWEEN)
    rate = arguments.prompts * arguments.prompt_tokens / (time.perf_counter() - started_at)
    latencies = sorted(1e3 * one for one in latencies)
    p99 = latencies[int(0.99 * len(latencies))]
    model = engine.core.scheduler.stats().step_time
    median_alone, median = 1e3 * statistics.median(alone), statistics.median(latencies)
    print(f"| {schedule.chunking} | {median_alone:.1f} | {median:.1f} | {p99:.1f} | {latencies[-1]:.1f} | "
          f"{p99 / arguments.target_ms:.2f} | {rate:.0f} | {model.relative_error:.0%} | "
          f"{1e3 * model.overrun_seconds:.1f} |", flush=True)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--target-ms", type=float, default=50.0)
    parser.add_argument("--decoders", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=20,
                        help="some 25 steps each under itl_bounded; few have no 99th percentile but their worst step")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of all chunkings, one after the other")
    arguments = parser.parse_args()
    loaded = load_model(ModelConfig(model=arguments.model, dtype=arguments.dtype, max_model_len=4096))
    print(f"{loaded.fingerprint}\ntarget {arguments.target_ms} ms, {arguments.decoders} decoders, prompts of "
          f"{arguments.prompt_tokens} tokens\n\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    schedule = SchedulerConfig(itl_target_ms=arguments.target_ms)
    heap.settle()    # as in a server
    for _ in range(arguments.repeats):
        for chunking in ("whole", "fixed", "itl_bounded"):
            measure(loaded, replace(schedule, chunking=chunking), arguments)


if __name__ == "__main__":
    main()

"""A closed loop around an engine in this process, without HTTP, for scripts/bench_peers.py: ours or OpenVINO's.

  python scripts/in_process.py paceline MODEL [--dtype int8]      in Paceline's environment
  python scripts/in_process.py openvino MODEL.gguf                in OpenVINO's own (scripts/peers.sh), without Paceline

Both meet the same loop: one thread adds the requests of clients that are free, steps, and takes what the step brought;
nothing is turned into text. Each line of standard input is a load, {"num_clients", "requests": [[prompt token ids,
number of output tokens], ...]}; its answer is one line, a list of [sent at, [times of tokens], [tokens at each]],
seconds of one monotonic clock. Between loads it sleeps. "ready" is the first line.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

MAX_NUM_SEQS, CACHE_GIGABYTES = 32, 2


class Engine(Protocol):
    def add(self, number: int, token_ids: Sequence[int], num_output: int) -> None:
        """A request under a number that no other has had. Greedy, and all tokens are made."""

    def step(self) -> Iterator[tuple[int, int, bool]]:
        """Of requests with news: number, tokens, whether it has ended."""


class Paceline:
    def __init__(self, options: argparse.Namespace) -> None:
        import paceline
        from paceline.engine.messages import Submit
        from paceline.request import SamplingParams

        knobs = {} if options.dtype is None else {"dtype": options.dtype}
        self._llm = paceline.LLM(options.model, max_model_len=options.max_model_len, max_num_seqs=MAX_NUM_SEQS, **knobs)
        self._submit, self._sampling = Submit, SamplingParams

    def add(self, number: int, token_ids: Sequence[int], num_output: int) -> None:
        core = self._llm.core
        sampling = self._sampling(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        core.add(self._submit(request_id=str(number), prompt_token_ids=tuple(token_ids), sampling=sampling,
                              arrival_time=core.clock.now()))

    def step(self) -> Iterator[tuple[int, int, bool]]:
        for output in self._llm.core.step().outputs:
            yield int(output.request_id), len(output.token_ids), output.finish_reason is not None


class OpenVINO:
    def __init__(self, options: argparse.Namespace) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        if options.dtype is not None:
            raise SystemExit("--dtype is for paceline")
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = CACHE_GIGABYTES, MAX_NUM_SEQS
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU")
        self._config, self._running = openvino_genai.GenerationConfig, openvino_genai.GenerationStatus.RUNNING
        self._tensor = lambda ids: openvino.Tensor(np.asarray([ids], np.int64))
        self._handles: dict[int, Any] = {}

    def add(self, number: int, token_ids: Sequence[int], num_output: int) -> None:
        config = self._config()
        config.max_new_tokens = config.min_new_tokens = num_output
        config.ignore_eos = True
        self._handles[number] = self._pipeline.add_request(number, self._tensor(token_ids), config)

    def step(self) -> Iterator[tuple[int, int, bool]]:
        self._pipeline.step()
        for number, handle in list(self._handles.items()):
            num_tokens = 0
            while handle.can_read():
                num_tokens += sum(len(output.generated_ids) for output in handle.read().values())
            if has_ended := handle.get_status() != self._running:
                del self._handles[number]
            if num_tokens or has_ended:
                yield number, num_tokens, has_ended


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {"paceline": Paceline, "openvino": OpenVINO}
Answer = tuple[float, list[float], list[int]]


def run(engine: Engine, requests: Sequence[Any], num_clients: int, first_number: int) -> list[Answer]:
    """All requests, of which num_clients are under way at once."""
    waiting = iter(enumerate(requests, first_number))
    answers: dict[int, Answer] = {}
    num_free, has_more = num_clients, True
    while has_more or num_free < num_clients:
        while num_free and has_more:
            if (one := next(waiting, None)) is None:
                has_more = False
                break
            number, (token_ids, num_output) = one
            answers[number] = (time.perf_counter(), [], [])
            engine.add(number, token_ids, num_output)
            num_free -= 1
        if num_free == num_clients:
            break
        for number, num_tokens, has_ended in engine.step():
            if num_tokens:
                answers[number][1].append(time.perf_counter())
                answers[number][2].append(num_tokens)
            num_free += has_ended
    return list(answers.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--dtype", help="of paceline's weights (default: the file's own)")
    parser.add_argument("--max-model-len", type=int, default=4096, help="of paceline (default: 4096)")
    options = parser.parse_args()
    engine = ENGINES[options.engine](options)
    print("ready", flush=True)
    num_requests = 0
    for line in sys.stdin:
        load = json.loads(line)
        gc.collect()
        gc.freeze()
        print(json.dumps(run(engine, load["requests"], load["num_clients"], num_requests)), flush=True)
        num_requests += len(load["requests"])


if __name__ == "__main__":
    main()

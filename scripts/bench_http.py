"""Closed-loop load over HTTP against any OpenAI-compatible server: the decode-heavy table of docs/benchmarks.md.

K clients each keep one streamed completion running: prompts of 8 to 32 words that no earlier run has sent, 150 to 250
output tokens, `ignore_eos`, temperature 0. After a warm-up, each of several rounds is a window of fixed length. The
figures of a round, by definition:

  tokens/s   output tokens that arrived inside the window, over its length. The server counts a request's tokens
             (`usage`); they are spread evenly over its chunks, so a chunk may hold several.
  TTFT       first chunk - start of the HTTP request; median over requests whose first chunk is inside the window
  TPOT       (last chunk - first chunk) / (tokens - 1) of a request; median over requests that ended in the window

The table shows the median over the rounds, and the least and the greatest tokens/s. The client is a process of its own
but shares the machine: the share of one core it used, and how late its event loop ran, are reported with the figures.

  python scripts/bench_http.py --command '.venv/bin/paceline serve smollm2 --port {port}'
  python scripts/bench_http.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

WORDS = (
    "river stone lantern window garden winter copper silver market valley engine letter morning harbor "
    "forest bridge mirror candle thunder meadow castle village pencil ribbon summer kitchen mountain "
    "basket island orchard planet shadow tunnel velvet whistle anchor bottle circle dragon feather"
).split()

COLUMNS = ("clients", "tokens/s (least to greatest)", "TPOT ms", "TTFT ms", "requests", "memory GB/s",
           "client core %", "client lag ms")


@dataclass(slots=True)
class Sample:
    """One request as its client saw it. Times are time.perf_counter() seconds."""

    started_at: float
    chunk_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    asked_tokens: int = 0
    error: str | None = None

    @property
    def ttft_seconds(self) -> float:
        return self.chunk_times[0] - self.started_at

    @property
    def tpot_seconds(self) -> float:
        return (self.chunk_times[-1] - self.chunk_times[0]) / max(1, self.num_tokens - 1)


# --- one request ------------------------------------------------------------------------------------------------------


def make_body(rng: random.Random, salt: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    # The salt comes first, so that no prefix of the prompt can have been cached by an earlier run.
    words = [salt, *(rng.choice(WORDS) for _ in range(rng.randint(*options.prompt_words) - 1))]
    return {"model": model, "prompt": " ".join(words), "max_tokens": rng.randint(*options.output_tokens),
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
    """The payloads of a server-sent event stream with the time each arrived."""
    buffer = b""
    async for piece in response.content.iter_any():
        now = time.perf_counter()
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip()


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Sample:
    payload = orjson.dumps(body)
    sample = Sample(time.perf_counter(), asked_tokens=body["max_tokens"])
    try:
        headers = {"content-type": "application/json"}
        async with session.post(f"{url}/v1/completions", data=payload, headers=headers) as response:
            if response.status != 200:
                sample.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return sample
            async for arrived_at, event in read_events(response):
                note_event(sample, arrived_at, event)
    except (aiohttp.ClientError, TimeoutError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    if sample.error is None and sample.num_tokens != sample.asked_tokens:
        sample.error = f"asked for {sample.asked_tokens} tokens, got {sample.num_tokens}"
    return sample


def note_event(sample: Sample, arrived_at: float, event: bytes) -> None:
    if event == b"[DONE]":
        return
    chunk = orjson.loads(event)
    if "error" in chunk:
        sample.error = str(chunk["error"])
        return
    if chunk.get("usage"):
        sample.num_tokens = chunk["usage"]["completion_tokens"]
    # A chunk without text still counts if it carries no finish_reason: half a character may be held back by the server.
    if chunk["choices"] and (chunk["choices"][0].get("text") or chunk["choices"][0].get("finish_reason") is None):
        sample.chunk_times.append(arrived_at)


# --- a closed loop of K clients ---------------------------------------------------------------------------------------


class Load:
    """K clients that send their next request as soon as the last one ended, until stopped."""

    def __init__(self, url: str, model: str, num_clients: int, salt: str, options: argparse.Namespace) -> None:
        self.url, self.model, self.num_clients, self.salt, self.options = url, model, num_clients, salt, options
        self.finished: list[Sample] = []
        self.is_stopping = False
        self.lags: list[float] = []

    async def run(self, windows: list[tuple[float, float]]) -> None:
        """Fills `windows` with (start, end) of each round; returns when the last request has ended."""
        # force_close: some servers close the connection after a stream, and a client that reuses it then fails.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            clients = [asyncio.create_task(self._client(session, index)) for index in range(self.num_clients)]
            lag = asyncio.create_task(self._watch_lag())
            await asyncio.sleep(self.options.warmup_seconds)
            self.lags.clear()
            for _ in range(self.options.rounds):
                start = time.perf_counter()
                await asyncio.sleep(self.options.seconds)
                windows.append((start, time.perf_counter()))
            self.is_stopping = True
            lag.cancel()
            await asyncio.gather(*clients)

    async def _client(self, session: aiohttp.ClientSession, index: int) -> None:
        rng = random.Random(f"{self.options.seed}/{self.num_clients}/{index}")
        await asyncio.sleep(index / self.num_clients)    # ramp in: clients in lock step would measure prefill bursts
        count = 0
        while not self.is_stopping:
            salt = f"{self.salt}-{self.num_clients}-{index}-{count}"
            sample = await complete(session, self.url, make_body(rng, salt, self.model, self.options))
            self.finished.append(sample)
            if sample.error is not None:
                await asyncio.sleep(0.2)
            count += 1

    async def _watch_lag(self) -> None:
        while True:
            due = time.perf_counter() + 0.02
            await asyncio.sleep(0.02)
            self.lags.append(time.perf_counter() - due)


def tokens_inside(sample: Sample, start: float, end: float) -> float:
    inside = sum(start <= at < end for at in sample.chunk_times)
    return sample.num_tokens * inside / max(1, len(sample.chunk_times))


def median_ms(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) * 1e3 if seconds else None


def summarise_round(samples: Sequence[Sample], start: float, end: float) -> dict[str, Any]:
    whole = [s for s in samples if s.error is None and s.chunk_times]
    ended = [s for s in whole if start <= s.chunk_times[-1] < end]
    begun = [s for s in whole if start <= s.chunk_times[0] < end]
    return {
        "seconds": end - start,
        "tokens_per_second": sum(tokens_inside(s, start, end) for s in whole) / (end - start),
        "tpot_ms": median_ms([s.tpot_seconds for s in ended]),
        "ttft_ms": median_ms([s.ttft_seconds for s in begun]),
        "num_requests": len(ended),
    }


def over_rounds(rounds: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [r[name] for r in rounds if r[name] is not None]
    return statistics.median(values) if values else None


async def measure(url: str, model: str, num_clients: int, salt: str, options: argparse.Namespace) -> dict[str, Any]:
    bandwidth = read_bandwidth()
    load, windows = Load(url, model, num_clients, salt, options), list[tuple[float, float]]()
    cpu, wall = time.process_time(), time.perf_counter()
    await load.run(windows)
    cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    rounds = [summarise_round(load.finished, start, end) for start, end in windows]
    errors = [s.error for s in load.finished if s.error is not None]
    return {
        "clients": num_clients,
        "tokens_per_second": over_rounds(rounds, "tokens_per_second"),
        "tokens_per_second_least": min(r["tokens_per_second"] for r in rounds),
        "tokens_per_second_greatest": max(r["tokens_per_second"] for r in rounds),
        "tpot_ms": over_rounds(rounds, "tpot_ms"),
        "ttft_ms": over_rounds(rounds, "ttft_ms"),
        "num_requests": sum(r["num_requests"] for r in rounds),
        "read_gb_per_second": bandwidth,
        "client_core_share": cpu_share,
        "client_lag_p99_ms": float(np.percentile(load.lags, 99)) * 1e3 if load.lags else None,
        "num_errors": len(errors),
        "first_errors": errors[:3],
        "rounds": rounds,
    }


# --- the machine and the server ---------------------------------------------------------------------------------------


def read_bandwidth(num_threads: int = 2, num_megabytes: int = 256, repeats: int = 7) -> float:
    """GB/s that num_threads threads read together: median of a few passes over an array larger than the caches. Virtual
    machines flip between memory states, so a figure is worth little without it."""
    array = np.ones(num_megabytes << 18, np.float32)
    parts = np.array_split(array, num_threads)
    rates = []
    for _ in range(repeats):
        threads = [threading.Thread(target=np.maximum.reduce, args=(part,)) for part in parts]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(array.nbytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates)


def processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.split(":", 1)[1].strip()
    return "unknown"


def commit() -> str:
    run = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True,
                         cwd=Path(__file__).parent, check=False)
    return run.stdout.strip() or "unknown"


def peak_memory_mb(pid: int) -> float | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(command: str, log: Path) -> Iterator[tuple[str, float, subprocess.Popen[bytes]]]:
    """Starts the server; gives its address, when it was started, and the process. Ends it with SIGTERM."""
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    with log.open("wb") as output:
        started_at = time.perf_counter()
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield f"http://127.0.0.1:{port}", started_at, process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def wait_until_healthy(url: str, process: subprocess.Popen[bytes] | None, limit_seconds: float) -> float:
    """The time at which /health first answered 200."""
    deadline = time.perf_counter() + limit_seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.perf_counter() < deadline:
            if process is not None and process.poll() is not None:
                sys.exit(f"the server ended with status {process.returncode} before it was healthy; see its log")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return time.perf_counter()
            await asyncio.sleep(0.01)
    sys.exit(f"{url}/health did not answer 200 within {limit_seconds} s")


async def served_model(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


async def first_answer(url: str, model: str, salt: str, options: argparse.Namespace) -> float:
    """Seconds from sending the first request of the server's life to its first token."""
    async with aiohttp.ClientSession() as session:
        body = make_body(random.Random(options.seed), f"{salt}-first", model, options) | {"max_tokens": 2}
        sample = await complete(session, url, body)
    if sample.error is not None:
        sys.exit(f"the first request failed: {sample.error}")
    return sample.ttft_seconds


# --- report -----------------------------------------------------------------------------------------------------------


def markdown_row(row: dict[str, Any]) -> str:
    def number(name: str, digits: int = 1, scale: float = 1.0) -> str:
        return "-" if row[name] is None else f"{row[name] * scale:.{digits}f}"

    least, greatest = number("tokens_per_second_least"), number("tokens_per_second_greatest")
    spread = f"{number('tokens_per_second')} ({least} to {greatest})"
    cells = (str(row["clients"]), spread, number("tpot_ms", 2), number("ttft_ms"), str(row["num_requests"]),
             number("read_gb_per_second"), number("client_core_share", 0, 100), number("client_lag_p99_ms"))
    return "| " + " | ".join(cells) + " |"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def pair(text: str) -> tuple[int, int]:
        low, _, high = text.partition("-")
        return int(low), int(high or low)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--command", help="starts the server; {port} stands for the port it shall listen on")
    where.add_argument("--url", help="a server that already runs")
    parser.add_argument("--model", help="name to ask for; default: the first of /v1/models")
    parser.add_argument("--clients", default="1,8,16,32", help="numbers of clients, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a round")
    parser.add_argument("--warmup-seconds", type=float, default=5.0)
    parser.add_argument("--prompt-words", type=pair, default=(8, 32), metavar="LOW-HIGH")
    parser.add_argument("--output-tokens", type=pair, default=(150, 250), metavar="LOW-HIGH")
    parser.add_argument("--seed", type=int, default=0, help="draws lengths and words; the salt differs in every run")
    parser.add_argument("--start-limit-seconds", type=float, default=180.0)
    parser.add_argument("--log", type=Path, default=Path("bench-results/server.log"), help="the server's output")
    parser.add_argument("--json", type=Path, default=Path("bench-results/bench_http.json"), help="where the figures go")
    return parser.parse_args(argv)


async def run(url: str, started_at: float | None, process: subprocess.Popen[bytes] | None,
              options: argparse.Namespace) -> dict[str, Any]:
    healthy_at = await wait_until_healthy(url, process, options.start_limit_seconds)
    model = options.model or await served_model(url)
    salt = os.urandom(4).hex()
    result: dict[str, Any] = {
        "command": options.command or options.url, "model": model, "processor": processor_name(),
        "cores": os.cpu_count(), "commit": commit(), "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "start_to_health_seconds": None if started_at is None else healthy_at - started_at,
        "first_answer_seconds": await first_answer(url, model, salt, options),
        "prompt_words": options.prompt_words, "output_tokens": options.output_tokens, "seed": options.seed,
        "salt": salt, "rows": [],
    }
    print_head(result, options)
    for num_clients in (int(text) for text in options.clients.split(",")):
        row = await measure(url, model, num_clients, salt, options)
        result["rows"].append(row)
        print(markdown_row(row), flush=True)
    result["server_peak_memory_mb"] = None if process is None else peak_memory_mb(process.pid)
    return result


def print_head(result: dict[str, Any], options: argparse.Namespace) -> None:
    start = result["start_to_health_seconds"]
    print(f"command: `{result['command']}`")
    print(f"processor: {result['processor']}, {result['cores']} cores; commit: {result['commit']}; "
          f"{result['measured_at']}")
    print(f"start to /health 200: {'-' if start is None else f'{start:.2f} s'}; "
          f"first token of the first request: {result['first_answer_seconds'] * 1e3:.0f} ms")
    print(f"{options.rounds} rounds of {options.seconds:g} s after {options.warmup_seconds:g} s of warm-up; "
          f"seed {result['seed']}, salt {result['salt']}\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)


def main() -> None:
    options = parse_args()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    if options.command:
        with server(options.command, options.log) as (url, started_at, process):
            result = asyncio.run(run(url, started_at, process, options))
    else:
        result = asyncio.run(run(options.url.rstrip("/"), None, None, options))
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nserver peak memory: {result['server_peak_memory_mb'] or 0:.0f} MB; all figures: {options.json}")
    num_errors = sum(row["num_errors"] for row in result["rows"])
    if num_errors:
        first = next(row["first_errors"][0] for row in result["rows"] if row["first_errors"])
        sys.exit(f"{num_errors} requests failed; the first: {first}")


if __name__ == "__main__":
    main()

"""A long, unkind load on a real `paceline serve` process, and what must hold after it. Exit status 1 if it does not.

At the start many streams are opened together and held until all have begun. Then clients send requests one after
another: streams and whole answers, one or two choices, greedy and drawn. Of all requests a tenth hangs up, half of
those before the first event, and a twentieth is malformed. Every body that is served comes again and again, and must be
answered with the same text each time, whoever else runs; so a lost or doubled event shows. Checked:

  events     each choice ends once, usage is exact, [DONE] comes once and last, the text is that of the first time
  malformed  refused with the status that its kind has
  peak       so many streams are open at one moment, begun and not ended; each goes on for some events and hangs up
  memory     resident bytes of the server, median of the last quarter: at most 5% above the second quarter's
  blocks     all free, nothing running or waiting
  files, tasks, threads    as many as before the load

The model is tiny (a golden checkpoint of the tests: two layers, 256 tokens), so that time goes to everything around it.

  python scripts/soak.py                                        50,000 requests: some minutes on two quiet cores
  python scripts/soak.py --requests 2000 --peak 100             a glance
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "tests" / "golden" / "families" / "llama3"
COMMAND = (f"{shlex.quote(sys.executable)} -m paceline.cli serve {{model}} --port 0 --max-num-seqs 1280 "
           "--max-num-batched-tokens 4096 --num-kv-blocks 8192 --max-queue 4096 --log-level warning")
MAX_POSITION = 4096        # of the copy that is served: room for streams that do not end while others begin
NUM_BODIES = 300
MAX_MEMORY_GROWTH = 0.05
LEAST_TO_JUDGE_MEMORY = 20_000    # then every block of the pool has been used before the second quarter
SPARE_FILES = 8            # descriptors that may come and go beside connections
MALFORMED: tuple[tuple[int, bytes, str], ...] = (    # status, body, media type
    (400, b"", "application/json"), (400, b"{", "application/json"), (400, b"[1]", "application/json"),
    (400, b'{"prompt": "\\ud800"}', "application/json"), (400, b'{"prompt": [1], "n": 0}', "application/json"),
    (400, b'{"prompt": [1], "stream": true, "temperature": 9}', "application/json"),
    (400, b'{"prompt": [99999]}', "application/json"), (400, b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", ""),
    (404, b'{"prompt": [1], "model": "nobody"}', "application/json"), (415, b'{"prompt": [1]}', "text/plain"),
    (400, b'{"prompt": [' + b"1," * 5000 + b"1]}", "application/json"),
)


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    log: list[str]

    def resident_bytes(self) -> int:
        return sum(_status(pid, "VmRSS") * 1024 for pid in self._pids())

    def num_files(self) -> int:
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self._pids())

    def num_threads(self) -> int:
        return sum(_status(pid, "Threads") for pid in self._pids())

    def _pids(self) -> list[int]:
        """The server and, with a transport of processes, its engine."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]


def _status(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@contextlib.contextmanager
def serving(command: str) -> Iterator[Server]:
    process = subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    server = Server(process, "", [])
    for line in process.stdout:
        server.log.append(line)
        if found := re.search(r"listening on (http://\S+)", line):
            server.url = found[1]
        if "ready" in line:
            break
    else:
        sys.exit("the server did not start:\n" + "".join(server.log))
    threading.Thread(target=lambda: server.log.extend(process.stdout or ()), daemon=True).start()
    try:
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@dataclass(slots=True)
class Sample:
    """The state of things after so many requests had ended."""

    num_done: int
    seconds: float
    resident_bytes: int
    num_files: int


@dataclass
class Soak:
    """The load, and what it has seen."""

    server: Server
    session: aiohttp.ClientSession
    arguments: argparse.Namespace
    bodies: list[dict[str, Any]]
    texts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    long_texts: dict[int, str] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    num_started: int = 0
    num_done: int = 0
    num_tokens: int = 0
    most_open_streams: int = 0

    async def client(self, number: int) -> None:
        rng = random.Random(self.arguments.seed * 100_003 + number)
        while self.num_started < self.arguments.requests:
            self.num_started += 1
            draw = rng.random()
            try:
                if draw < self.arguments.malformed:
                    await self.malformed(rng)
                elif draw < self.arguments.malformed + self.arguments.hangups:
                    await self.hang_up(rng)
                else:
                    await self.complete(rng)
            except Exception as error:
                self.fault(f"{type(error).__name__}: {error}"[:150])
            self.num_done += 1

    def fault(self, what: str) -> None:
        self.faults[what] += 1

    def post(self, body: dict[str, Any]) -> Any:
        return self.session.post(f"{self.server.url}/v1/completions", json=body)

    async def peak(self) -> None:
        """Many streams at once. Their connections stand beforehand, so that they begin close together."""
        num_connected, all_connected, all_begun = 0, asyncio.Event(), asyncio.Event()

        async def connect() -> None:
            nonlocal num_connected
            async with self.session.get(f"{self.server.url}/health") as response:
                num_connected += 1
                if num_connected == self.arguments.peak:
                    all_connected.set()
                await all_connected.wait()    # so that none takes the connection of another
                await response.read()

        await asyncio.gather(*(connect() for _ in range(self.arguments.peak)))
        await asyncio.gather(*(self.hold_open(number, all_begun) for number in range(self.arguments.peak)))

    async def hold_open(self, number: int, all_begun: asyncio.Event) -> None:
        """One of the streams of the peak."""
        self.kinds["peak"] += 1
        index = number % 20
        body = self.bodies[index] | {"max_tokens": MAX_POSITION, "stream": True, "n": 1}
        async with self.post(body) as response:
            self.most_open_streams += 1
            if self.most_open_streams >= self.arguments.peak:
                all_begun.set()
            text, num_left = "", 30
            async for line in response.content:
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    num_left -= all_begun.is_set()
                if num_left == 0:
                    break
            else:
                self.fault("a stream of the peak ended before all had begun")
                all_begun.set()
            response.close()
        known = self.long_texts.setdefault(index, text)
        if not (known.startswith(text) or text.startswith(known)):
            self.fault("two streams of one body differ")

    async def malformed(self, rng: random.Random) -> None:
        self.kinds["malformed"] += 1
        status, body, media_type = rng.choice(MALFORMED)
        headers = {"content-type": media_type or "application/json"}
        async with self.session.post(f"{self.server.url}/v1/completions", data=body, headers=headers) as response:
            answer = await response.json()
            if response.status != status or set(answer["error"]) != {"message", "type", "param", "code"}:
                self.fault(f"malformed {body[:40]!r}: {response.status} instead of {status}")

    async def hang_up(self, rng: random.Random) -> None:
        self.kinds["hung up"] += 1
        body = rng.choice(self.bodies) | {"max_tokens": 80, "stream": True}
        if rng.random() < 0.5:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.post(body), rng.random() * 0.05)
            return
        async with self.post(body) as response:
            await response.content.readline()
            response.close()

    async def complete(self, rng: random.Random) -> None:
        index = rng.randrange(len(self.bodies))
        body = self.bodies[index]
        if rng.random() < 0.85:
            body = body | {"stream": True, "stream_options": {"include_usage": True}}
        self.kinds["streams" if body.get("stream") else "whole answers"] += 1
        async with self.post(body) as response:
            if response.status != 200:
                self.fault(f"status {response.status}: {(await response.text())[:100]}")
                return
            texts = await (self.read_stream(response, body) if body.get("stream") else self.read_answer(response, body))
        if texts is not None and self.texts.setdefault(index, texts) != texts:
            self.fault("a body was answered with another text than before")

    async def read_answer(self, response: aiohttp.ClientResponse, body: dict[str, Any]) -> tuple[str, ...]:
        answer = await response.json()
        self.check_usage(answer["usage"], body)
        return tuple(choice["text"] for choice in answer["choices"])

    async def read_stream(self, response: aiohttp.ClientResponse, body: dict[str, Any]) -> tuple[str, ...]:
        events = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
        if events.count(b"[DONE]") != 1 or events[-1] != b"[DONE]":
            self.fault("a stream without its one [DONE] at the end")
        texts, ends = [""] * body["n"], [0] * body["n"]
        *chunks, usage = [json.loads(event) for event in events[:-1]]
        for chunk in chunks:
            (choice,) = chunk["choices"]
            if ends[choice["index"]]:
                self.fault("an event after the end of its choice")
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] += choice["finish_reason"] is not None
        if ends != [1] * body["n"] or usage["choices"]:
            self.fault("a choice that did not end once")
        self.check_usage(usage["usage"], body)
        return tuple(texts)

    def check_usage(self, usage: dict[str, Any], body: dict[str, Any]) -> None:
        self.num_tokens += usage["completion_tokens"]
        expected = (len(body["prompt"]), body["n"] * body["max_tokens"])
        if (usage["prompt_tokens"], usage["completion_tokens"]) != expected:
            self.fault("usage is not exact")

    def sample(self, started_at: float) -> None:
        self.samples.append(Sample(self.num_done, time.perf_counter() - started_at, self.server.resident_bytes(),
                                   self.server.num_files()))

    async def watch(self, started_at: float) -> None:
        while True:
            self.sample(started_at)
            await asyncio.sleep(0.5)

    async def metric(self, name: str) -> float:
        async with self.session.get(f"{self.server.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(re.escape(name) + r"[ {]", line))

    async def until_idle(self) -> bool:
        """The last aborts are on their way when the last client has gone."""
        for _ in range(300):
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "paceline:open_replies")
            if not sum([await self.metric(name) for name in names]):
                return True
            await asyncio.sleep(0.1)
        return False


def make_bodies(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, 250) for _ in range(40)]    # every other prompt begins with a part of this
    return [{
        "prompt": shared[: 16 * (index % 3)] + [rng.randrange(3, 250) for _ in range(rng.randrange(1, 30))],
        "max_tokens": rng.randrange(2, 24), "n": 1 + (index % 10 == 0), "ignore_eos": True, "seed": index,
        "temperature": 0 if index % 2 else 0.9} for index in range(NUM_BODIES)]


def roomy_copy(directory: Path) -> Path:
    """The golden checkpoint, for longer texts than it was made for; what they say is of no interest."""
    shutil.copytree(CHECKPOINT, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_POSITION}))
    return directory


def quarters(samples: list[Sample], num_requests: int) -> list[list[Sample]]:
    found: list[list[Sample]] = [[], [], [], []]
    for sample in samples:
        found[min(sample.num_done * 4 // num_requests, 3)].append(sample)
    return found


def print_table(soak: Soak) -> None:
    print(f"{'quarter':>8} {'seconds':>8} {'requests/s':>11} {'resident MB':>12} {'files':>7}")
    last = Sample(0, 0.0, 0, 0)
    for number, part in enumerate(quarters(soak.samples, soak.arguments.requests), start=1):
        if not part:
            continue
        seconds, done = part[-1].seconds - last.seconds, part[-1].num_done - last.num_done
        print(f"{number:>8} {seconds:>8.1f} {done / max(seconds, 1e-9):>11.0f} "
              f"{statistics.median(one.resident_bytes for one in part) / 1e6:>12.1f} "
              f"{max(one.num_files for one in part):>7}")
        last = part[-1]
    total = max(last.seconds, 1e-9)
    print(f"{soak.num_done} requests in {total:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in soak.kinds.items())
          + f"; {soak.num_tokens} tokens, {soak.num_tokens / total:.0f} tokens/s")


def memory_verdict(soak: Soak) -> tuple[bool, str]:
    parts = [[one.resident_bytes for one in part] for part in quarters(soak.samples, soak.arguments.requests)]
    if not parts[1] or not parts[3]:
        return False, "too few samples to compare quarters"
    if soak.arguments.requests < LEAST_TO_JUDGE_MEMORY:
        return True, f"not judged under {LEAST_TO_JUDGE_MEMORY} requests: the pool's pages are still being touched"
    second, last = statistics.median(parts[1]), statistics.median(parts[3])
    return last <= second * (1 + MAX_MEMORY_GROWTH), f"{second / 1e6:.1f} MB, then {last / 1e6:.1f} MB"


async def run(server: Server, arguments: argparse.Namespace) -> dict[str, tuple[bool, str]]:
    """The load, then the verdicts: name -> (holds, figures)."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        soak = Soak(server, session, arguments, make_bodies(arguments.seed))
        await soak.complete(random.Random(0))    # what is made at the first request is no leak
        files, threads = server.num_files(), server.num_threads()
        tasks = await soak.metric("paceline:event_loop_tasks")
        started_at = time.perf_counter()
        watching = asyncio.ensure_future(soak.watch(started_at))
        await soak.peak()
        await asyncio.gather(*(soak.client(number) for number in range(arguments.clients)))
        soak.sample(started_at)
        watching.cancel()
        is_idle = await soak.until_idle()
        usage = await soak.metric("vllm:kv_cache_usage_perc")
        await asyncio.sleep(2)    # for the idle connections of this client to be closed
        tasks_after = await soak.metric("paceline:event_loop_tasks")
        files_after, threads_after = server.num_files(), server.num_threads()
    print_table(soak)
    for what, count in soak.faults.most_common(10):
        print(f"  {count} x {what}")
    return {
        "events": (not soak.faults, f"{sum(soak.faults.values())} faults"),
        "peak": (soak.most_open_streams >= arguments.peak, f"{soak.most_open_streams} streams open at once"),
        "memory": memory_verdict(soak),
        "blocks": (is_idle and usage == 0, f"{usage:.0%} in use"),
        "files": (files_after <= files + SPARE_FILES, f"{files}, then {files_after}"),
        "tasks": (tasks_after <= tasks + 2, f"{tasks:.0f}, then {tasks_after:.0f}"),
        "threads": (threads_after <= threads, f"{threads}, then {threads_after}"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=COMMAND, help="how to start the server; {model} is the checkpoint")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=250, help="requests in flight (default: 250)")
    parser.add_argument("--peak", type=int, default=1000, help="streams open together (default: 1000)")
    parser.add_argument("--hangups", type=float, default=0.10)
    parser.add_argument("--malformed", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (arguments.clients + arguments.peak) * 2 + 200
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with tempfile.TemporaryDirectory() as directory, serving(arguments.command.format(
            model=roomy_copy(Path(directory)))) as server:
        verdicts = asyncio.run(run(server, arguments))
        server.process.terminate()
        status = server.process.wait(60)
    verdicts["exit"] = (status == 0, f"status {status} after SIGTERM")
    for name, (holds, figures) in verdicts.items():
        print(f"{'ok' if holds else 'FAILED':>8}  {name}: {figures}")
    return 0 if all(holds for holds, _ in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

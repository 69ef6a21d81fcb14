"""What a server costs besides its tokens: start to first token beside the Python peers, memory, and what it does idle.

    python scripts/bench_footprint.py [--rounds 5] [--peer "vLLM bf16" --peer OpenVINO]

Start is from the creation of the process to the end of a completion of one token, asked for every 10 ms until it is
answered; files are in the page cache from a start before that is not counted, and kernels are built. Memory is the
anonymous resident memory of the server's processes after 64 requests by 32 clients, less the packed weights and less
what is resident of the KV pool's mapping. Idle is processor time over 20 seconds, 2 seconds after the last answer. The
environments of the peers come from `make peers`. For docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bench_peers

OWN = "paceline 4-bit"
PYTHON_PEERS = ("vLLM bf16", "OpenVINO")
ASK_AGAIN_SECONDS = 0.01
MOST_SECONDS = 300.0
SETTLE_SECONDS, IDLE_SECONDS = 2.0, 20.0
NUM_CLIENTS, NUM_REQUESTS = 32, 64
TICKS = os.sysconf("SC_CLK_TCK")
KIB = 1024


class Server:
    """One that was started and has sent its first token."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port

    def complete(self, num_tokens: int, number: int = 0) -> None:
        """Raises OSError, or what http.client raises, where there is nobody, or not yet."""
        body = {"model": "smollm2", "prompt": [100 + (number * 31 + i) % 999 for i in range(16)], "stream": True,
                "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise ConnectionError(answer.read(300))
            first = answer.readline()
            if not first.startswith(b"data: {"):
                raise SystemExit(f"unexpected: {first!r}")
            answer.read()
        finally:
            connection.close()

    def processes(self) -> list[int]:
        """The group's."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(entry.name)) == self.process.pid:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
        return found


@contextmanager
def started(name: str) -> Iterator[tuple[Server, float]]:
    """The server, and the seconds until its first token."""
    command, environment = bench_peers.CONTESTANTS[name]
    places = {"peers": str(bench_peers.PEERS), "python": sys.executable, "root": str(bench_peers.ROOT)}
    port = free_port()
    line = command.format(**places).format(port=port, cores=2)
    variables = os.environ | dict(environment) | {"PYTHONPATH": str(bench_peers.ROOT)}
    begun_at = time.perf_counter()
    process = subprocess.Popen(line.split(), env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    server = Server(process, port)
    try:
        yield server, first_token(server, begun_at)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def first_token(server: Server, begun_at: float) -> float:
    """One token and no more is asked for, so that the whole answer is there with the first."""
    while (seconds := time.perf_counter() - begun_at) < MOST_SECONDS:
        if server.process.poll() is not None:
            raise SystemExit(f"{server.process.args!r} ended with status {server.process.returncode}")
        try:
            server.complete(1)
            return time.perf_counter() - begun_at
        except (OSError, http.client.HTTPException):
            time.sleep(ASK_AGAIN_SECONDS)
    raise SystemExit(f"{server.process.args!r}: no token in {seconds:.0f} seconds")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def starts(names: list[str], num_rounds: int) -> None:
    print("| server | start to first token, s: median (least to greatest) |\n|---|---|")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds + 1):
        for name in names:
            with started(name) as (_, took):
                if number:    # the first start fills the page cache
                    seconds[name].append(took)
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}) |", flush=True)


def memory_and_idle() -> None:
    with started(OWN) as (server, _):
        load(server)
        weights, pool = sizes()
        anonymous, in_pool = anonymous_bytes(server, pool)
        print(f"\nanonymous {anonymous / 1e6:.1f} MB, of it weights {weights / 1e6:.1f}, KV {in_pool / 1e6:.1f}: "
              f"beyond them **{(anonymous - weights - in_pool) / 1e6:.1f} MB**")
        time.sleep(SETTLE_SECONDS)
        before, at = ticks(server), time.perf_counter()
        time.sleep(IDLE_SECONDS)
        share = (ticks(server) - before) / TICKS / (time.perf_counter() - at)
        print(f"idle: **{share:.2%}** of one core over {IDLE_SECONDS:.0f} seconds")


def load(server: Server) -> None:
    numbers = iter(range(NUM_REQUESTS))
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            server.complete(200, number)

    threads = [threading.Thread(target=client) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def sizes() -> tuple[int, int]:
    """Bytes of packed weights and of the KV pool, as `paceline info` tells."""
    told = subprocess.run([sys.executable, "-m", "paceline.cli", "info", "smollm2", "--json"], check=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(bench_peers.ROOT)}).stdout
    memory = json.loads(told)["memory"]
    weights = sum(value for name, value in memory.items() if name.endswith("weights_bytes"))
    return weights, memory["kv_pool_bytes"]


def anonymous_bytes(server: Server, pool_bytes: int) -> tuple[int, int]:
    """(all, in the mapping as large as the pool) of the server's processes."""
    total = in_pool = 0
    for process in server.processes():
        size = 0
        for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
            if match := re.match(r"(Size|Anonymous): +(\d+) kB", line):
                value = int(match[2]) * KIB
                if match[1] == "Size":
                    size = value
                else:
                    total += value
                    in_pool += value if size >= pool_bytes else 0
    return total, in_pool


def ticks(server: Server) -> int:
    return sum(int(part) for process in server.processes()
               for part in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11:13])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="append", choices=sorted(bench_peers.CONTESTANTS),
                        help=f"may be repeated; default: {', '.join(PYTHON_PEERS)}")
    options = parser.parse_args()
    starts([OWN, *(options.peer or PYTHON_PEERS)], options.rounds)
    memory_and_idle()


if __name__ == "__main__":
    main()

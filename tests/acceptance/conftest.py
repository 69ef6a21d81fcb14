"""A real `paceline serve` process on the real model, and what clients need to reach it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest


@dataclass
class Server:
    """A server process. `log` grows with what it prints."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    url: str = ""
    reader: threading.Thread | None = None

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if re.match(re.escape(name) + r"[ {]", line)]
        assert values, f"{name} is not on /metrics"
        return sum(map(float, values))

    def until_idle(self) -> None:
        """Aborts may be on their way; each poll is a round trip of the server's own loop."""
        for _ in range(200):
            if self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0:
                return
        raise AssertionError("requests of clients that have left still run")

    def stop(self) -> int:
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Its exit status, when all it printed is in `log`."""
        status = self.process.wait(60)
        assert self.reader is not None
        self.reader.join(60)
        return status


def start_server(*arguments: str, model: str = "smollm2", environment: dict[str, str] | None = None) -> Server:
    """Returns when the server has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", "serve", model, "--port", "0", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | (environment or {}))
    server = Server(process)
    assert process.stdout is not None
    for line in process.stdout:
        server.log.append(line)
        if found := re.search(r"listening on (http://[\d.]+:\d+)", line):
            server.url = found.group(1)
        if "ready" in line:
            break
    else:
        raise AssertionError("the server ended before it was ready:\n" + "".join(server.log))
    # Someone must go on reading, or a full pipe would stop the server.
    server.reader = threading.Thread(target=lambda: server.log.extend(process.stdout), daemon=True)
    server.reader.start()
    return server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that loads at once and has room for a text that does not end while a test looks at it."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(Path(__file__).parents[1] / "golden" / "families" / "llama3", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 17}))
    return str(directory)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*arguments: str, **more: Any) -> Server:
        started.append(start_server(*arguments, **more))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()

"""How a real `paceline serve` process ends: each way has its exit status, and no client is left waiting."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from .conftest import Server

Serve = Callable[..., Server]
ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 100_000, "ignore_eos": True, "temperature": 0}


def children(pid: int) -> dict[int, str]:
    """Command lines of a process's children."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def engine_process(server: Server) -> int:
    (pid,) = (pid for pid, command in children(server.process.pid).items() if "spawn_main" in command)
    return pid


def told_at_the_end(lines: list[str]) -> dict[str, str]:
    return json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]


@contextlib.contextmanager
def open_stream(server: Server, **fields: object):    # type: ignore[no-untyped-def]
    """A stream whose first event has come."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS | {"stream": True} | fields,
                      timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def test_a_killed_engine_process_ends_the_server_with_status_1(serve: Serve, tiny_model: str) -> None:
    server = serve("--transport", "process", "--grace-seconds", "3600", model=tiny_model)
    with open_stream(server) as lines:
        os.kill(engine_process(server), signal.SIGKILL)
        error = told_at_the_end(list(lines))
    assert error["type"] == "service_unavailable" and "-9" in error["message"]
    assert server.wait() == 1
    assert any("the engine has died" in line for line in server.log)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs job control")
def test_an_engine_process_that_hangs_ends_the_server_with_its_stacks(serve: Serve, tiny_model: str) -> None:
    server = serve("--transport", "process", "--step-timeout-seconds", "1", model=tiny_model)
    with open_stream(server) as lines:
        pid = engine_process(server)
        os.kill(pid, signal.SIGSTOP)
        error = told_at_the_end(list(lines))
    assert "running for more than 1 seconds" in error["message"]
    os.kill(pid, signal.SIGCONT)    # stopped, it could not write its stacks
    assert server.wait() == 1
    assert any("_serve_messages" in line for line in server.log)


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_two_signals_end_it_at_once_with_status_1(serve: Serve, tiny_model: str, transport: str) -> None:
    server = serve("--transport", transport, "--grace-seconds", "3600", model=tiny_model)
    with open_stream(server):
        server.process.terminate()
        while httpx.get(f"{server.url}/health").json()["status"] != "draining":
            pass
        server.process.terminate()
        assert server.wait() == 1


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_drained_server_leaves_with_status_0(serve: Serve, tiny_model: str, transport: str) -> None:
    server = serve("--transport", transport, model=tiny_model)
    with open_stream(server, max_tokens=40) as lines:
        server.process.terminate()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.wait() == 0

"""However an engine breaks, and wherever its loop runs: its streams are told, and the process leaves with status 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
TOLD = {
    "error": "RuntimeError: a kernel broke", "hang": "running for more than 0.5 seconds",
    "crash": "the engine process ended with exit status 9"}
LOGGED = {"error": "a kernel broke", "hang": "in a_step_that_hangs", "crash": "the engine has died"}


@pytest.mark.parametrize(("how", "transport"), [
    ("error", "thread"), ("error", "process"), ("hang", "thread"), ("hang", "process"), ("crash", "process")])
def test_a_broken_engine_tells_its_streams_and_ends_the_process(how: str, transport: str) -> None:
    command = [sys.executable, "-m", "tests.server.serve_broken", how, transport]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            log = [process.stderr.readline()]
            url = log[0].split()[-1]
            while "ready" not in log[-1]:
                log.append(process.stderr.readline())
            body = {"prompt": [1, 2, 3], "max_tokens": 100, "stream": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
            _, rest = process.communicate(timeout=30)
        finally:
            process.kill()
    *events, last = [line for line in answer.text.split("\n\n") if line]
    assert len(events) == 4 and "[DONE]" not in last
    error = json.loads(last.removeprefix("data: "))["error"]
    assert TOLD[how] in error["message"] and error["type"] == "service_unavailable"
    assert process.returncode == 1
    assert LOGGED[how] in rest

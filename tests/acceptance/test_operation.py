"""What who runs a server sees of a real `paceline serve`: its log, its keys, and how many files it may open."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from .conftest import Server

Serve = Callable[..., Server]
SECRET = "what nobody else shall read"


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_json_log_is_json_to_the_last_line_and_keeps_secrets(serve: Serve, tiny_model: str, transport: str) -> None:
    server = serve("--log-format", "json", "--transport", transport, "--num-kv-blocks", "8", model=tiny_model,
                   environment={"PACELINE_API_KEY": "the-key-itself"})
    body = {"prompt": SECRET, "max_tokens": 3, "ignore_eos": True}    # sampled: it may end early else
    headers = {"authorization": "Bearer the-key-itself", "x-request-id": "mine"}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 401
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    assert server.stop() == 0
    records = [json.loads(line) for line in server.log]
    events = [record["event"] for record in records]
    assert events.count("request") == 2 and "ready" in events
    assert any("requests are limited to 128 tokens" in event for event in events)    # told by the engine's side
    denied, served = (record for record in records if record["event"] == "request")
    assert (denied["status"], served["status"], served["id"]) == (401, 200, "mine")
    assert served["output_tokens"] == 3 and served["decode_seconds"] >= 0
    assert SECRET not in "".join(server.log) and "the-key-itself" not in "".join(server.log)


def test_a_text_log_of_level_warning_has_no_line_for_a_request(serve: Serve, tiny_model: str) -> None:
    server = serve("--log-level", "warning", model=tiny_model)
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
    assert server.stop() == 0
    assert not any("request" in line and "status=" in line for line in server.log)


def test_a_key_file_that_is_missing_ends_it_before_the_model_is_loaded(serve: Serve, tiny_model: str) -> None:
    with pytest.raises(AssertionError, match=r"api_key_file='/nowhere' cannot be read"):
        serve("--api-key-file", "/nowhere", model=tiny_model)


def test_a_server_may_open_as_many_files_as_the_system_lets_it(serve: Serve, tiny_model: str) -> None:
    server = serve(model=tiny_model)
    limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    soft, hard = line.split()[3:5]
    assert soft == hard or int(soft) >= 65536


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_timeout_that_cannot_be_kept_is_refused_at_the_door(serve: Serve, tiny_model: str, transport: str) -> None:
    server = serve("--transport", transport, "--ordering", "deadline", "--prefix-cache", "none", model=tiny_model)
    body = {"prompt": [1, 2, 3] * 2000, "max_tokens": 1, "timeout": 600}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200    # one is measured
    answer = httpx.post(f"{server.url}/v1/completions", json=body | {"timeout": 0.001}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "deadline_infeasible", "timeout")
    assert error["message"].startswith("timeout: 0.001 s cannot be kept; by what was measured of late")
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    server.until_idle()
    assert server.stop() == 0


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_request_ends_at_its_timeout_and_gives_its_blocks_back(
    serve: Serve, tiny_model: str, transport: str
) -> None:
    server = serve("--transport", transport, "--max-num-seqs", "1", model=tiny_model)
    body = {"prompt": [1, 2, 3], "max_tokens": 100_000, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60) as first:
        lines = first.iter_lines()
        next(lines)    # it has the only place: whoever comes now waits
        waiting = httpx.post(f"{server.url}/v1/completions", json=body | {"timeout": 0.3}, timeout=60)
        assert waiting.status_code == 504 and waiting.json()["error"]["code"] == "deadline_exceeded"
    server.until_idle()
    cut = httpx.post(f"{server.url}/v1/completions", json=body | {"timeout": 0.5}, timeout=60).json()
    assert cut["choices"][0]["finish_reason"] == "abort" and 0 < cut["usage"]["completion_tokens"] < 100_000
    server.until_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.stop() == 0

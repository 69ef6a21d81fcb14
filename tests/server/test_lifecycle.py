"""From loading to the end: what /health says, what running requests see, and the exit status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline.config import ServerConfig
from paceline.errors import ConfigError, EngineDead, ModelError
from paceline.server.serve import EngineSlot, bind

from .conftest import RunningServer, StartServer
from .raw import connect, json_request, read_all, read_answer, read_until

ENDLESS = {"prompt": "hi", "max_tokens": 250, "ignore_eos": True}
ROOT = Path(__file__).parents[2]


def health(server: RunningServer) -> tuple[int, str]:
    response = server.get("/health")
    return response.status_code, response.json()["status"]


def test_health_while_loading_and_after(start_server: StartServer) -> None:
    server = start_server(is_loaded=False)
    assert health(server) == (503, "loading")
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": []})):
        response = server.post(path, body)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "engine_loading"
    assert "max_model_len" not in server.get("/v1/models").json()["data"][0]
    assert server.get("/version").status_code == server.get("/metrics").status_code == 200
    server.load()
    assert health(server) == (200, "ok")
    assert server.completion().status_code == 200
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="fake-model"} 1.0' in (
        server.get("/metrics").text)    # a listener that came before the engine


def test_health_when_stalled(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "has_stalled", True)
    assert health(server) == (503, "stalled")
    assert server.get("/ping").status_code == 503
    server.on_loop(setattr, server.engine, "has_stalled", False)
    assert health(server) == (200, "ok")


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_tells_everybody(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("paceline.server.serve.DEAD_SECONDS", 3600)
    server = start_server()
    server.on_loop(server.engine.hold)
    with connect(server.port) as early, connect(server.port) as late:
        for connection in (early, late):
            connection.sendall(json_request("/v1/completions", ENDLESS | {"stream": stream}))
        server.until(lambda: server.engine.num_unfinished == 2)
        if stream:
            server.on_loop(server.engine.step)
            read_until(early, b"\n\n")
        server.on_loop(server.engine.die, "the step raised")
        for connection in (early, late):
            if stream:
                assert b"the step raised" in read_until(connection, b"\r\n0\r\n\r\n")
            else:
                status, answer = read_answer(connection)
                assert status == 503 and "the step raised" in answer["error"]["message"]
    assert health(server) == (503, "dead")
    response = server.completion()
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
    assert "retry-after" not in response.headers
    server.loop.call_soon_threadsafe(server.service.ask_to_stop)
    server.join()
    assert server.exit_status == 1    # whoever started the server should learn that it failed


def test_the_server_of_a_dead_engine_leaves_by_itself(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.serve.DEAD_SECONDS", 0)
    server = start_server(grace_seconds=3600.0)
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", ENDLESS | {"stream": True}))
        server.until(lambda: server.engine.num_unfinished == 1)
        server.on_loop(server.engine.step)
        read_until(connection, b"\n\n")
        server.on_loop(server.engine.die, "the step raised")
        assert b"the step raised" in read_all(connection)
    server.join()
    assert server.exit_status == 1 and server.error is None


def test_an_engine_that_dies_while_it_drains_ends_the_drain(start_server: StartServer) -> None:
    server = start_server(grace_seconds=3600.0)
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", ENDLESS))
        server.until(lambda: server.engine.num_unfinished == 1)
        server.on_loop(server.service.ask_to_stop)
        server.until(lambda: server.engine.state == "draining")
        server.on_loop(server.engine.die)
        assert read_answer(connection)[0] == 503
    server.join()
    assert server.exit_status == 1


def test_an_engine_that_dies_between_check_and_submit(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "submit_error", EngineDead("gone"))
    assert server.completion(stream=True).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_of_ours_is_a_500_and_not_the_end(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.engine.model.tokenizer, "encode", lambda *args: 1 / 0)
        response = server.completion(stream=stream)
        assert response.status_code == 500 and response.headers["x-request-id"]
        assert response.json()["error"] == {
            "message": "internal error; the server's log has the details", "type": "server_error", "param": None,
            "code": "internal_error"}
    assert server.completion(stream=stream).status_code == 200


def test_a_bug_in_the_middle_of_a_stream_ends_it(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", ENDLESS | {"stream": True}))
        server.until(lambda: server.engine.num_unfinished == 1)
        server.on_loop(server.engine.step)
        read_until(connection, b"\n\n")
        monkeypatch.setattr("paceline.server.generation.Choice.take", lambda *args: 1 / 0)
        server.on_loop(server.engine.step)
        assert b'"internal_error"' in read_until(connection, b"\r\n0\r\n\r\n")
    server.until(lambda: server.engine.num_unfinished == 0)


def test_what_comes_after_the_cut_is_refused(start_server: StartServer) -> None:
    server = start_server()
    server.on_loop(server.service._live.cut_all)
    for stream in (False, True):
        response = server.completion(stream=stream)
        assert response.status_code == 503 and "shutting down" in response.json()["error"]["message"]
    assert not server.engine.submitted


def test_draining_refuses_the_new_and_finishes_the_old(start_server: StartServer) -> None:
    server = start_server(grace_seconds=60.0)
    server.on_loop(server.engine.hold)
    with connect(server.port) as stream, connect(server.port) as plain:
        stream.sendall(json_request("/v1/completions", ENDLESS | {"stream": True, "max_tokens": 3}))
        plain.sendall(json_request("/v1/completions", ENDLESS | {"max_tokens": 3}))
        server.until(lambda: server.engine.num_unfinished == 2)
        server.on_loop(server.service.ask_to_stop)
        server.until(lambda: server.engine.state == "draining")
        assert health(server) == (503, "draining")
        response = server.completion()
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_draining"
        assert response.headers["retry-after"] == "1" and response.headers["connection"] == "close"
        server.on_loop(server.engine.release)
        assert read_all(stream).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        status, answer = read_answer(plain)
        assert status == 200 and answer["usage"]["completion_tokens"] == 3
    server.join()
    assert server.exit_status == 0 and server.error is None
    with pytest.raises(httpx.ConnectError):
        server.get("/health")


def test_when_the_grace_is_over_streams_get_an_error_and_a_close(start_server: StartServer) -> None:
    server = start_server(grace_seconds=0.0)
    server.on_loop(server.engine.hold)
    with connect(server.port) as stream, connect(server.port) as plain:
        for connection, wants_stream in ((stream, True), (plain, False)):
            connection.sendall(json_request("/v1/completions", ENDLESS | {"stream": wants_stream}))
        server.until(lambda: server.engine.num_unfinished == 2)
        server.on_loop(server.engine.step)
        read_until(stream, b"\n\n")
        server.on_loop(server.service.ask_to_stop)
        rest = read_all(stream)
        error = json.loads(rest.partition(b"data: ")[2].partition(b"\n\n")[0])["error"]
        assert "shutting down" in error["message"] and error["type"] == "service_unavailable"
        assert rest.endswith(b"\r\n0\r\n\r\n") and b"[DONE]" not in rest
        assert read_answer(plain)[0] == 503
    server.join()
    assert server.exit_status == 0


def test_the_second_signal_does_not_wait(start_server: StartServer) -> None:
    server = start_server(grace_seconds=3600.0)
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", ENDLESS))
        server.until(lambda: server.engine.num_unfinished == 1)
        for _ in range(2):
            server.on_loop(server.service.ask_to_stop)
        server.join()
    assert server.exit_status == 1


def test_a_client_that_does_not_read_cannot_hold_the_server(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .fake_engine import FakeModel

    monkeypatch.setattr("paceline.server.serve.CLOSE_SECONDS", 1)
    server = start_server(FakeModel(max_model_len=100_000), grace_seconds=60.0)
    body = ENDLESS | {"stream": True, "max_tokens": 20_000}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(json_request("/v1/completions", body))
        server.until(lambda: server.engine.submitted and server.engine.num_unfinished == 0)
        server.on_loop(server.service.ask_to_stop)
        server.join()
    assert server.exit_status == 0


def test_a_stop_while_loading_ends_at_once(start_server: StartServer) -> None:
    server = start_server(is_loaded=False)
    server.on_loop(server.service.ask_to_stop)
    server._may_load.set()
    server.join()
    assert server.exit_status == 0


def test_a_model_that_does_not_load_ends_the_process_with_its_error(start_server: StartServer) -> None:
    server = start_server(is_loaded=False)
    server.loading_error = ModelError("tensor missing")
    server._may_load.set()
    server.join()
    assert isinstance(server.error, ModelError)


def test_a_port_in_use_is_the_callers_mistake() -> None:
    first = bind("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("127.0.0.1", first.getsockname()[1])
    first.close()
    with pytest.raises(ConfigError):
        bind("no.such.host.invalid", 0)


def test_the_slot_of_an_engine_that_loads() -> None:
    slot = EngineSlot()
    assert (slot.state, slot.stats, slot.num_unfinished, slot.is_stalled(1)) == ("loading", None, 0, False)
    with pytest.raises(EngineDead):
        _ = slot.model
    assert ServerConfig().grace_seconds > 0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.server.serve_fake"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as running:
        yield running
        running.kill()


def told(process: subprocess.Popen[str], mark: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if mark in line:
            return line
    raise AssertionError(f"the process ended without {mark!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_exit_status_is_0(process: subprocess.Popen[str], number: int) -> None:
    port = int(told(process, "listening on ").rpartition(":")[2])
    told(process, "ready")
    request = json_request("/v1/completions", ENDLESS | {"stream": True})
    connections = [connect(port) for _ in range(10)]
    for connection in connections:
        connection.sendall(request)
        read_until(connection, b"data: ")
    process.send_signal(number)
    for connection in connections:
        assert read_all(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        connection.close()
    assert process.wait(20) == 0


def test_two_signals_end_it_at_once(process: subprocess.Popen[str]) -> None:
    port = int(told(process, "listening on ").rpartition(":")[2])
    told(process, "ready")
    with connect(port) as connection:
        connection.sendall(json_request("/v1/completions", ENDLESS | {"stream": True, "prompt": "slow"}))
        read_until(connection, b"data: ")
        process.send_signal(signal.SIGTERM)
        while httpx.get(f"http://127.0.0.1:{port}/health").json()["status"] != "draining":
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 1

"""Clients that send or read a byte now and then, or stop: none holds a connection, memory or blocks for ever."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any

import pytest

from paceline.server import limits, protocol, serve

from .conftest import RunningServer, StartServer
from .fake_engine import FakeModel
from .raw import connect, head, json_request, read_all, read_answer

JSON_TYPE = {"content-type": "application/json"}


def drip(connection: socket.socket, piece: bytes) -> None:
    """Sends again and again until the server says something or hangs up."""
    try:
        while not select.select([connection], [], [], 0)[0]:
            connection.sendall(piece)
    except ConnectionError:
        pass


def test_a_body_that_comes_byte_by_byte_is_given_up(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(limits, "MIN_BODY_BYTES_PER_SECOND", 1 << 40)    # nobody is fast enough
    with connect(server.port) as connection:
        connection.sendall(head("/v1/completions", {**JSON_TYPE, "content-length": 10 << 20}))
        drip(connection, b" ")
        status, answer = read_answer(connection)
    assert status == 408 and answer["error"]["code"] == "request_timeout"


def test_a_slow_but_honest_body_has_its_time(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_IDLE_SECONDS", 20)
    body = b'{"prompt": "x", "max_tokens": 1}'
    with connect(server.port) as connection:
        connection.sendall(head("/v1/completions", {**JSON_TYPE, "content-length": len(body)}))
        for place in range(len(body)):
            connection.sendall(body[place : place + 1])
        assert read_answer(connection)[0] == 200


def test_a_head_that_comes_byte_by_byte_is_cut(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(protocol, "MAX_HEAD_BYTES", 1 << 30)
    with connect(server.port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        drip(connection, b"x")
        with contextlib.suppress(ConnectionError):    # cut while bytes were on their way
            assert read_all(connection) == b""
    assert server.get("/health").status_code == 200


def test_too_many_headers_are_refused(server: RunningServer) -> None:
    with connect(server.port) as connection:
        connection.sendall(head("/health", {f"x-{number}": "1" for number in range(protocol.MAX_HEADERS)}, "GET"))
        status, answer = read_answer(connection)
    assert status == 431 and answer["error"]["code"] == "too_many_headers"
    with connect(server.port) as connection:
        connection.sendall(head("/health", {f"x-{number}": "1" for number in range(90)}, "GET"))
        assert read_answer(connection)[0] == 200


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch, start_server: StartServer) -> RunningServer:
    """A server whose sockets hold little, so that a client that does not read is felt soon."""
    bind = serve.bind

    def bind_narrowly(host: str, port: int) -> socket.socket:
        listener = bind(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(serve, "bind", bind_narrowly)
    return start_server(FakeModel(max_model_len=1_000_000))


def connect_narrowly(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", port))
    return connection


def num_connections(server: RunningServer) -> int:
    return server.on_loop(lambda: len(server.service._server.server_state.connections))


def test_a_client_that_stops_reading_its_stream_is_aborted(
    narrow: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "WRITE_STALL_SECONDS", 0.1)
    endless: dict[str, Any] = {"prompt": "x", "max_tokens": 900_000, "ignore_eos": True, "stream": True}
    with connect_narrowly(narrow.port) as connection:
        connection.sendall(json_request("/v1/completions", endless))
        narrow.until(lambda: narrow.engine.aborted)    # it never reads and never hangs up
        narrow.until(lambda: narrow.engine.num_unfinished == 0)
        assert narrow.engine.stats is not None
        assert narrow.engine.stats.num_free_blocks == narrow.engine.stats.num_blocks
    assert narrow.completion().status_code == 200


def test_a_client_that_reads_now_and_then_is_served_to_the_end(
    narrow: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "WRITE_STALL_SECONDS", 20)
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with connect_narrowly(narrow.port) as connection:
        connection.sendall(json_request("/v1/completions", body, {"connection": "close"}))
        narrow.until(lambda: narrow.engine.submitted and narrow.engine.num_unfinished == 0)    # long before it reads
        received = read_all(connection)
    assert received.count(b"data: ") == 3002 and b"[DONE]" in received
    assert not narrow.engine.aborted


def test_an_idle_connection_that_does_not_even_take_its_answer_is_cut(
    narrow: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.05)
    monkeypatch.setattr(narrow.service._server.config, "timeout_keep_alive", 0.05)
    with connect_narrowly(narrow.port) as connection:
        # Less than the 64 KB that would count as stalled, more than the kernel takes.
        connection.sendall(json_request("/v1/completions", {"prompt": "x" * 50_000, "echo": True, "max_tokens": 1}))
        narrow.until(lambda: narrow.engine.submitted and narrow.engine.num_unfinished == 0)
        while num_connections(narrow):
            pass

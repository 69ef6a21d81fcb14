"""Bodies that no honest client sends. Each is answered in JSON, costs little, and the next request is fine."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.server import limits, prompts

from .conftest import RunningServer, StartServer
from .raw import connect, exchange, head, read_answer, read_until

PATHS = ("/v1/completions", "/v1/chat/completions")
JSON_TYPE = {"content-type": "application/json"}


def send(server: RunningServer, body: bytes, headers: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    framing = {**JSON_TYPE, "content-length": len(body), **(headers or {})}
    return exchange(server.port, head("/v1/completions", framing) + body)


BAD_JSON: list[tuple[bytes, str | None, str]] = [
    (b"", None, "empty"), (b"  \n ", None, "empty"), (b"[]", None, "object"), (b'"x"', None, "object"),
    (b"null", None, "object"), (b"5", None, "object"), (b"{", None, "JSON"), (b"}", None, "JSON"),
    (b'{"prompt": "x"', "prompt", "JSON"), (b'{"prompt": "x"} x', None, "JSON"), (b"prompt=x", None, "JSON"),
    (b'\xef\xbb\xbf{"prompt": "x"}', None, "JSON"), (b'{"prompt": "x",}', "prompt", "JSON"),
    (b'{"temperature": NaN}', "temperature", "JSON"), (b'{"temperature": Infinity}', "temperature", "JSON"),
    (b'{"prompt": "a", "temperature": -Infinity}', "temperature", "JSON"),
    (b'{"temperature": 1e999}', "temperature", "infinity"), (b'{"top_p": -1e999}', "top_p", "infinity"),
    (b'{"prompt": "\\ud83d"}', "prompt", "surrogate"), (b'{"prompt": "\\ud83d", "n": 1}', "prompt", "surrogate"),
    (b'{"n": 1, "prompt": ["a", {"b": "\\udc00"}]}', "prompt", "surrogate"), (b'{"\\ud83d": 1}', None, "surrogate"),
    (b'{"n": 1, "prompt": "\xff"}', "prompt", "UTF-8"), (b'{"prompt": "\xc3"}', "prompt", "UTF-8"),
    (b"\xff", None, "UTF-8"),
    (b'{"prompt": "\xed\xa0\xbd"}', "prompt", "UTF-8"), (b'{"prompt": "\x00"}', "prompt", "control"),
    (b'{"prompt": "\\"', "prompt", "JSON"),
]


@pytest.mark.parametrize(("body", "param", "word"), BAD_JSON)
def test_what_is_not_strict_json_is_refused_with_its_field(
    server: RunningServer, body: bytes, param: str | None, word: str
) -> None:
    status, answer = send(server, body)
    assert status == 400, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert word.lower() in error["message"].lower()
    assert error["message"].startswith(param or "body")
    assert server.completion().status_code == 200


def test_of_duplicate_keys_the_last_wins(server: RunningServer) -> None:
    status, answer = send(server, b'{"prompt": "x", "max_tokens": 5, "max_tokens": 2}')
    assert status == 200 and answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", PATHS)
def test_deep_nesting_is_refused_with_depth_and_limit(server: RunningServer, path: str) -> None:
    body = b'{"prompt": ' + b"[" * 4999 + b"]" * 4999 + b"}"
    status, answer = exchange(server.port, head(path, {**JSON_TYPE, "content-length": len(body)}) + body)
    assert status == 400
    assert "5000 levels" in answer["error"]["message"] and "64" in answer["error"]["message"]


def test_nesting_at_the_limit_is_parsed() -> None:
    at_limit = b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}"
    assert limits.parse_object(at_limit, 64)
    with pytest.raises(RequestError, match="65 levels"):
        limits.parse_object(b'{"b": ' + at_limit + b"}", 64)


@pytest.mark.parametrize("text", ["[" * 5000, '\\"' + "[" * 5000, "\\\\", '\\\\\\"' + "{" * 5000, "]" * 100])
def test_brackets_in_strings_do_not_nest(text: str) -> None:
    body = b'{"a": "%s", "b": [[]], "c": "%s"}' % (text.encode(), ("[" * 100).encode())
    assert limits.parse_object(body, 4) == json.loads(body)


@pytest.mark.parametrize("body", [
    b'{"prompt": [' + b"[]," * 4_000_000 + b"[]]}", b'{"prompt": [' + b'"",' * 4_000_000 + b'""]}',
    b"[" * 12_000_000, b'"' * 12_000_000, b"{" * 12_000_000, b'{"prompt": [' + b'{"a":1},' * 1_500_000 + b"1]}"])
def test_masses_of_tiny_values_cost_little(body: bytes) -> None:
    started = time.process_time()
    with pytest.raises(RequestError):
        limits.parse_object(body, 64)
    assert time.process_time() - started < 2


def test_a_body_that_says_it_is_too_large_is_not_read(server: RunningServer) -> None:
    framing = {**JSON_TYPE, "content-length": 100 << 20}
    status, answer = exchange(server.port, head("/v1/completions", framing) + b"{")
    assert status == 413
    assert answer["error"]["code"] == "request_too_large" and str(16 << 20) in answer["error"]["message"]


def test_a_client_that_sends_100_megabytes_reads_its_413(server: RunningServer) -> None:
    part = b"x" * (1 << 20)
    with connect(server.port) as connection:
        connection.sendall(head("/v1/completions", {**JSON_TYPE, "content-length": 100 << 20}))
        for _ in range(100):
            connection.sendall(part)
        status, _ = read_answer(connection)
        assert status == 413
        # The connection is in order: the rest of the body was skipped.
        connection.sendall(head("/health", {}, "GET"))
        assert read_answer(connection)[0] == 200


def test_a_chunked_body_without_a_length_is_cut_at_the_limit(start_server: StartServer) -> None:
    server = start_server(max_body_bytes=1 << 20)
    part = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with connect(server.port) as connection:
        connection.sendall(head("/v1/completions", {**JSON_TYPE, "transfer-encoding": "chunked"}))
        for _ in range(17):
            connection.sendall(part)
        assert read_answer(connection)[0] == 413
        connection.sendall(b"0\r\n\r\n" + head("/health", {}, "GET"))
        assert read_answer(connection)[0] == 200


def test_an_endless_refused_body_is_not_read_for_ever(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.protocol.LINGER_SECONDS", 0.05)
    with connect(server.port) as connection:
        connection.sendall(head("/v1/completions", {**JSON_TYPE, "content-length": 100 << 20}))
        assert read_answer(connection)[0] == 413
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"x" * 65536)


def test_normal_large_bodies_pass(start_server: StartServer) -> None:
    from .fake_engine import FakeModel

    server = start_server(FakeModel(max_model_len=300_000))
    body = json.dumps({"prompt": "word " * 40_000, "max_tokens": 2}).encode()
    assert len(body) > 200_000
    status, answer = send(server, body)
    assert status == 200 and answer["usage"]["prompt_tokens"] == 200_000
    chunked = head("/v1/completions", {**JSON_TYPE, "transfer-encoding": "chunked"})
    status, answer = exchange(server.port, chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert status == 200 and answer["usage"]["prompt_tokens"] == 200_000


@pytest.mark.parametrize(("headers", "status"), [
    ({"content-type": "text/plain"}, 415), ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ({"content-type": "multipart/form-data; boundary=x"}, 415), ({"content-type": "nonsense"}, 415),
    ({"content-type": "application/json; charset=utf-16"}, 415), ({"content-encoding": "gzip"}, 415),
    ({"content-type": "application/json; charset=UTF-8"}, 200), ({"content-type": "Application/JSON"}, 200),
    ({"content-type": "application/vnd.api+json"}, 200), ({"content-encoding": "identity"}, 200)])
def test_the_media_type_is_checked(server: RunningServer, headers: dict[str, str], status: int) -> None:
    got, answer = send(server, b'{"prompt": "x"}', headers)
    assert got == status
    if status == 415:
        assert answer["error"]["code"] == "unsupported_media_type"


def test_a_missing_media_type_is_taken_for_json(server: RunningServer) -> None:
    body = b'{"prompt": "x"}'
    assert exchange(server.port, head("/v1/completions", {"content-length": len(body)}) + body)[0] == 200


def test_a_body_that_stops_arriving_is_given_up(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_IDLE_SECONDS", 0.05)
    status, answer = exchange(server.port, head("/v1/completions", {**JSON_TYPE, "content-length": 100}) + b"{")
    assert status == 408 and answer["error"]["code"] == "request_timeout"


def test_a_client_that_leaves_while_sending_is_forgotten(server: RunningServer) -> None:
    for _ in range(20):
        with connect(server.port) as connection:
            connection.sendall(head("/v1/completions", {**JSON_TYPE, "content-length": 100}) + b"{")
    assert server.completion().status_code == 200


def test_health_answers_while_a_long_prompt_is_tokenised(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .fake_engine import FakeModel

    server = start_server(FakeModel(max_model_len=300_000))
    tokenizer, may_finish = server.engine.model.tokenizer, threading.Event()
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda *args: may_finish.wait(20) and encode(*args))
    body = json.dumps({"prompt": "x" * 10_000}).encode()
    with connect(server.port) as connection:
        connection.sendall(head("/v1/completions", {**JSON_TYPE, "content-length": len(body)}) + body)
        assert server.get("/health").status_code == 200    # would wait for ever behind the tokenizer
        may_finish.set()
        assert read_answer(connection)[0] == 200


def test_ten_megabytes_of_prompt_are_refused_at_once(server: RunningServer) -> None:
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    started = time.process_time()
    status, answer = send(server, body)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert time.process_time() - started < 2
    ids = json.dumps({"prompt": [1] * 2_000_000}).encode()
    assert send(server, ids)[1]["error"]["code"] == "context_length_exceeded"


def test_many_short_prompts_are_tokenised_off_the_loop(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    tokenizer, encode = server.engine.model.tokenizer, server.engine.model.tokenizer.encode

    def watched(text: str, add_special_tokens: bool) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", watched)
    server.completion(prompt=["x" * 100] * (prompts.MAX_INLINE_CHARS // 100 + 1), max_tokens=1)
    assert all(thread.startswith("paceline-tokenise") for thread in threads) and threads


def test_half_closed_and_pipelined_connections_are_served(server: RunningServer) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    request = head("/v1/completions", {**JSON_TYPE, "content-length": len(body)}) + body
    with connect(server.port) as connection:
        connection.sendall(request * 3)
        received = b""
        while received.count(b'"usage"') < 3:
            received += connection.recv(65536)
        assert received.count(b"HTTP/1.1 200 OK") == 3
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def test_expecting_clients_are_told_before_they_send(server: RunningServer) -> None:
    framing = {**JSON_TYPE, "expect": "100-continue"}
    with connect(server.port) as connection:
        connection.sendall(head("/v1/completions", {**framing, "content-length": 100 << 20}))
        assert read_answer(connection)[0] == 413
    body = b'{"prompt": "x"}'
    with connect(server.port) as connection:
        connection.sendall(head("/v1/completions", {**framing, "content-length": len(body)}))
        read_until(connection, b"100 Continue\r\n\r\n")
        connection.sendall(body)
        assert read_answer(connection)[0] == 200


def test_garbage_does_not_fill_the_log(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    assert exchange(server.port, b"\x16\x03\x01\r\n\r\n")[0] == 400
    upgrade = {"connection": "Upgrade", "upgrade": "websocket"}
    assert exchange(server.port, head("/health", upgrade, "GET"))[0] == 200
    assert caplog.text == ""

"""The field `timeout`: what becomes its deadline, and what a client is told when it has come."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.request import FinishReason

from .conftest import RunningServer
from .raw import connect, json_request, read_answer, read_until

ASKED: dict[str, Any] = {"prompt": "hi", "max_tokens": 100, "ignore_eos": True, "timeout": 5}


def test_the_deadline_counts_from_the_arrival(server: RunningServer) -> None:
    server.completion(prompt=["a", "b"], timeout=2.5)
    server.completion(timeout=None)
    first, second, without = server.engine.submitted
    assert first.deadline == second.deadline == first.arrival_time + 2.5
    assert without.deadline is None


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token_it_is_a_504(server: RunningServer, stream: bool) -> None:
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", ASKED | {"stream": stream, "n": 2}))
        server.until(lambda: server.engine.num_unfinished == 2)
        server.on_loop(server.engine.finish_all, FinishReason.TIMEOUT)
        status, answer = read_answer(connection)
    assert status == 504
    assert answer["error"] == {"message": "timeout: over before the first token came", "type": "timeout_error",
                               "param": "timeout", "code": "deadline_exceeded"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_after_it_what_came_is_kept_and_the_reason_is_abort(server: RunningServer, path: str) -> None:
    server.on_loop(server.engine.hold)
    body = ASKED | {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    del body["prompt" if path.endswith("chat/completions") else "messages"]
    with connect(server.port) as stream, connect(server.port) as plain:
        for connection, wants_stream in ((stream, True), (plain, False)):
            connection.sendall(json_request(path, body | {"stream": wants_stream}))
        server.until(lambda: server.engine.num_unfinished == 2)
        for _ in range(3):
            server.on_loop(server.engine.step)
        server.on_loop(server.engine.finish_all, FinishReason.TIMEOUT)
        events = read_until(stream, b"data: [DONE]")
        assert events.count(b'"finish_reason":"abort"') == 1
        status, answer = read_answer(plain)
    (choice,) = answer["choices"]
    assert status == 200 and choice["finish_reason"] == "abort" and answer["usage"]["completion_tokens"] == 3
    assert len(choice.get("text") or choice["message"]["content"]) == 3


@pytest.mark.parametrize("value", [0, -1, 86401, "5", True, 1e-9])
def test_a_timeout_that_is_none_is_refused(server: RunningServer, value: Any) -> None:
    response = server.completion(timeout=value)
    assert response.status_code == 400 and response.json()["error"]["param"] == "timeout"

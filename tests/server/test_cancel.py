"""Clients that hang up, and more clients than the queue holds."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import openai
import pytest

from paceline.server import prompts

from .conftest import MODEL, RunningServer, StartServer
from .raw import connect, json_request, read_answer, read_until

ENDLESS: dict[str, Any] = {"prompt": "hi", "max_tokens": 250, "ignore_eos": True}


@pytest.fixture
def held(server: RunningServer) -> RunningServer:
    """Its engine takes requests and computes nothing."""
    server.on_loop(server.engine.hold)
    return server


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_hangs_up_is_aborted(held: RunningServer, stream: bool) -> None:
    with connect(held.port) as connection:
        connection.sendall(json_request("/v1/completions", ENDLESS | {"stream": stream}))
        held.until(lambda: held.engine.num_unfinished == 1)
        if stream:
            held.on_loop(held.engine.step)
            read_until(connection, b"data: ")
    held.until(lambda: held.engine.num_unfinished == 0)    # nothing steps: only the abort can do this
    assert held.engine.aborted == [held.engine.submitted[0].request_id]


def test_all_prompts_and_choices_of_a_call_are_aborted(held: RunningServer) -> None:
    with connect(held.port) as connection:
        connection.sendall(json_request("/v1/completions", ENDLESS | {"prompt": ["a", "b", "c"], "n": 2}))
        held.until(lambda: held.engine.num_unfinished == 6)
    held.until(lambda: held.engine.num_unfinished == 0)
    assert held.engine.aborted == [one.request_id for one in held.engine.submitted]


def test_a_reset_connection_counts_as_hanging_up(held: RunningServer) -> None:
    connection = connect(held.port)
    connection.sendall(json_request("/v1/completions", ENDLESS))
    held.until(lambda: held.engine.num_unfinished == 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")    # close() sends a reset
    connection.close()
    held.until(lambda: held.engine.num_unfinished == 0)


def test_hanging_up_while_the_prompt_is_tokenised(held: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encode = held.engine.model.tokenizer, held.engine.model.tokenizer.encode
    has_begun, may_finish = threading.Event(), threading.Event()

    def slow(text: str, add_special_tokens: bool) -> list[int]:
        has_begun.set()
        may_finish.wait(20)
        return encode(text[:10], add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", slow)
    monkeypatch.setattr(prompts, "MAX_INLINE_CHARS", 100)
    with connect(held.port) as connection:
        connection.sendall(json_request("/v1/completions", ENDLESS | {"prompt": "x" * 200}))
        assert has_begun.wait(20)
    may_finish.set()
    held.until(lambda: held.engine.aborted and held.engine.num_unfinished == 0)


def test_finished_requests_are_not_aborted(server: RunningServer) -> None:
    server.completion(stream=True)
    server.completion()
    server.completion(prompt=["a", "b"], n=2)
    assert not server.engine.aborted


@pytest.mark.parametrize("stream", [False, True])
def test_two_hundred_clients_hang_up_and_the_next_is_served(held: RunningServer, stream: bool) -> None:
    request = json_request("/v1/completions", ENDLESS | {"stream": stream})
    with contextlib.ExitStack() as connections:
        for _ in range(200):
            connections.enter_context(connect(held.port)).sendall(request)
        held.until(lambda: held.engine.num_unfinished == 200)
    held.until(lambda: held.engine.num_unfinished == 0)
    held.on_loop(held.engine.release)
    assert len(held.engine.aborted) == 200
    assert held.completion().status_code == 200


def test_many_streams_closed_early_leave_nothing_behind(server: RunningServer) -> None:
    client = server.openai()
    for _ in range(50):
        with client.completions.create(model=MODEL, prompt="hi", max_tokens=250, stream=True) as stream:
            for _ in zip(range(3), stream, strict=False):
                pass
    server.until(lambda: server.engine.num_unfinished == 0)
    assert server.completion().status_code == 200
    assert server.on_loop(lambda: len(server.service._live)) == 0


def test_the_openai_clients_timeout_ends_the_request(held: RunningServer) -> None:
    client = held.openai(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt="hi")
    held.until(lambda: held.engine.submitted and held.engine.num_unfinished == 0)


def test_a_full_queue_is_a_429_with_retry_after(start_server: StartServer) -> None:
    server = start_server(max_queue=3)
    server.on_loop(server.engine.hold)
    request = json_request("/v1/completions", ENDLESS | {"max_tokens": 2})
    with contextlib.ExitStack() as connections:
        waiting = [connections.enter_context(connect(server.port)) for _ in range(3)]
        for connection in waiting:
            connection.sendall(request)
        server.until(lambda: server.engine.num_unfinished == 3)
        for stream in (False, True):
            response = server.completion(stream=stream)
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"] | {"message": ""} == {
                "message": "", "type": "rate_limit_error", "param": None, "code": "overloaded"}
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(model=MODEL, prompt="hi")
        assert server.get("/health").status_code == 200
        server.on_loop(server.engine.release)
        assert [read_answer(connection)[0] for connection in waiting] == [200] * 3
    assert server.completion().status_code == 200


def test_a_call_that_fits_only_in_part_leaves_nothing_behind(start_server: StartServer) -> None:
    server = start_server(max_queue=4)
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", ENDLESS | {"max_tokens": 2}))
        server.until(lambda: server.engine.num_unfinished == 1)
        response = server.completion(prompt=["a", "b"], n=2)
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        assert "2 more would exceed max_queue (4)" in response.json()["error"]["message"]    # the engine's own refusal
        assert server.engine.num_unfinished == 1
        server.on_loop(server.engine.release)
        assert read_answer(connection)[0] == 200


def test_a_crowd_is_answered_to_the_last(start_server: StartServer) -> None:
    server = start_server(max_queue=50)
    statuses: list[int] = []

    def ask() -> None:
        with connect(server.port) as connection:
            connection.sendall(json_request("/v1/completions", {"prompt": "hi", "max_tokens": 20}))
            statuses.append(read_answer(connection)[0])

    threads = [threading.Thread(target=ask) for _ in range(300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 300 and set(statuses) <= {200, 429} and 200 in statuses
    assert server.engine.num_unfinished == 0

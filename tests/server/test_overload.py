"""Limits of the queue over HTTP: who is refused, with which status, and what can never fit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from .conftest import RunningServer, StartServer
from .raw import connect, json_request, read_answer

HELD: dict[str, Any] = {"prompt": "0123456789", "max_tokens": 2, "ignore_eos": True}


@contextlib.contextmanager
def one_held(server: RunningServer, **fields: Any):    # type: ignore[no-untyped-def]
    """A request of ten tokens that waits while the block runs, and is answered after it."""
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", HELD | fields))
        server.until(lambda: server.engine.num_unfinished == 1)
        yield
        server.on_loop(server.engine.release)
        assert read_answer(connection)[0] == 200


def refused_by(server: RunningServer, limit: str, **fields: Any) -> bool:
    response = server.completion(**HELD | {"stream": True} | fields)
    error = response.json()["error"]
    assert int(response.headers["retry-after"]) >= 1
    return response.status_code == 429 and error["code"] == "overloaded" and f"exceed {limit} (" in error["message"]


def test_prompt_tokens_fill_the_queue_too(start_server: StartServer) -> None:
    server = start_server(max_queue_tokens=15)
    with one_held(server):
        assert refused_by(server, "max_queue_tokens")
        with connect(server.port) as connection:    # five tokens still fit
            connection.sendall(json_request("/v1/completions", HELD | {"prompt": "01234"}))
            server.until(lambda: server.engine.num_unfinished == 2)
    assert server.completion(**HELD).status_code == 200


def test_one_tenant_does_not_take_the_place_of_another(start_server: StartServer) -> None:
    server = start_server(max_queue_per_tenant=1, max_queue_tokens_per_tenant=12)
    with one_held(server, user="greedy"):
        assert refused_by(server, "max_queue_per_tenant", user="greedy")
        with connect(server.port) as connection:
            connection.sendall(json_request("/v1/completions", HELD | {"user": "modest"}))
            server.until(lambda: server.engine.num_unfinished == 2)
            assert {one.tenant for one in server.engine.submitted} == {"greedy", "modest"}


def test_the_status_of_a_full_queue_can_be_503(start_server: StartServer) -> None:
    server = start_server(max_queue=1, overload_status=503)
    with one_held(server):
        response = server.completion(**HELD)
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "service_unavailable"


@pytest.mark.parametrize(("knobs", "fields", "param"), [
    ({"max_queue_tokens": 9}, {}, "prompt"),
    ({"max_queue_tokens_per_tenant": 9, "max_queue_tokens": 100}, {}, "prompt"),
    ({"max_queue_tokens": 19}, {"prompt": ["0123456789", "0123456789"]}, "prompt"),
    ({"max_queue_per_tenant": 2}, {"n": 3}, "n"),
    ({"max_queue_per_tenant": 2}, {"prompt": ["a", "b", "c"]}, "prompt")])
def test_what_can_never_fit_is_the_callers_mistake(
    start_server: StartServer, knobs: dict[str, int], fields: dict[str, Any], param: str
) -> None:
    response = start_server(**knobs).completion(**HELD | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param and "retry-after" not in response.headers


def test_a_chat_that_can_never_fit_names_its_field(start_server: StartServer) -> None:
    response = start_server(max_queue_tokens=3).chat()
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"


def test_those_turned_away_are_counted_by_what_said_no(start_server: StartServer) -> None:
    server = start_server(max_queue_tokens=15, grace_seconds=3600.0)
    with one_held(server):
        server.completion(**HELD)
        server.completion(**HELD)
        server.on_loop(server.service.ask_to_stop)
        server.until(lambda: server.engine.state == "draining")
        server.completion(**HELD)
        counted = [line for line in server.get("/metrics").text.splitlines() if "requests_refused_total{" in line]
    assert sorted(line.partition("reason=")[2] for line in counted) == ['"draining"} 1.0', '"max_queue_tokens"} 2.0']

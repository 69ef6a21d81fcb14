"""One record a request: what stands in it, and what never does."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.request import FinishReason

from .conftest import RunningServer, StartServer
from .fake_engine import saying
from .raw import connect, head, json_request, read_all, read_until

SECRET = "the secret of the prompt"


class Records(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [record.fields for record in self.records if record.getMessage() == "request"]    # type: ignore[attr-defined]


@pytest.fixture
def log() -> Iterator[Records]:
    logger, records = logging.getLogger("paceline"), Records()
    level, handlers = logger.level, logger.handlers
    logger.handlers = [records]
    logger.setLevel(logging.INFO)
    yield records
    logger.handlers = handlers
    logger.setLevel(level)


def noted(server: RunningServer, log: Records, count: int = 1) -> list[dict[str, Any]]:
    """The records of `count` requests; a request is noted just after its answer was sent."""
    while len(log.requests) < count:
        server.on_loop(lambda: None)
    return log.requests


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_leaves_one_line_with_its_numbers(server: RunningServer, log: Records, stream: bool) -> None:
    body = {"prompt": SECRET, "max_tokens": 7, "user": "ann@example.com", "stream": stream}
    answer = server.post("/v1/completions", body, headers={"x-request-id": "mine-1"})
    (fields,) = noted(server, log)
    assert fields["id"] == "mine-1" and fields["route"] == "/v1/completions" and fields["method"] == "POST"
    assert (fields["status"], fields["prompt_tokens"], fields["output_tokens"]) == (200, len(SECRET), 7)
    assert fields["finish_reason"] == "length" and fields["stream"] is stream
    assert fields["call"] in answer.text
    assert all(fields[name] >= 0 for name in ("seconds", "queue_seconds", "prefill_seconds", "decode_seconds"))
    assert fields["tenant"].startswith("user:") and len(fields["tenant"]) == 17


def test_neither_prompt_nor_output_nor_user_nor_key_is_logged(start_server: StartServer, log: Records) -> None:
    logging.getLogger("paceline").setLevel(logging.DEBUG)
    server = start_server(api_key="the-key-itself")
    server.engine.script = saying("an answer nobody else shall read")
    headers = {"authorization": "Bearer the-key-itself"}
    bodies: list[dict[str, Any]] = [
        {"prompt": SECRET, "user": "ann@example.com"}, {"prompt": SECRET, "n": 0}, {"prompt": [SECRET, {}]},
        {"prompt": SECRET, SECRET: 1}, {"prompt": SECRET * 1000}, {"prompt": SECRET, "stop": [SECRET, ""]}]
    for body in bodies:
        server.post("/v1/completions", body, headers=headers)
    message = {"role": "user", "content": SECRET}
    server.post("/v1/chat/completions", {"messages": [message], "stream": True}, headers=headers)
    server.post("/v1/chat/completions", {"messages": [message | {"role": SECRET}]}, headers=headers)
    assert len(noted(server, log, 8)) == 8
    logged = " ".join(f"{record.getMessage()} {record.__dict__}" for record in log.records)
    for hidden in (SECRET, "nobody else shall read", "ann@example.com", "the-key-itself"):
        assert hidden not in logged


def test_failures_have_their_status(server: RunningServer, log: Records) -> None:
    server.completion(n=0)
    server.get("/nothing")
    assert [fields["status"] for fields in noted(server, log, 2)] == [400, 404]
    assert "prompt_tokens" not in log.requests[0]


def test_a_client_that_left_is_an_abort(server: RunningServer, log: Records) -> None:
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", {"prompt": "x", "max_tokens": 9}))
        server.until(lambda: server.engine.num_unfinished == 1)
        server.on_loop(server.engine.step)
    (fields,) = noted(server, log)
    assert (fields["status"], fields["finish_reason"]) == (499, "abort")


def test_a_failed_step_is_an_error(server: RunningServer, log: Records) -> None:
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", {"prompt": "x", "stream": True}, {"connection": "close"}))
        server.until(lambda: server.engine.num_unfinished == 1)
        server.on_loop(server.engine.step)
        read_until(connection, b"data: ")
        server.on_loop(server.engine.finish_all, FinishReason.ERROR)
        assert b"generation_failed" in read_all(connection)
    assert noted(server, log)[0]["finish_reason"] == "error"


def test_probes_are_told_at_debug_only(server: RunningServer, log: Records) -> None:
    server.get("/health")
    server.get("/metrics")
    server.get("/v1/models")
    assert [fields["route"] for fields in noted(server, log)] == ["/v1/models"]
    logging.getLogger("paceline").setLevel(logging.DEBUG)
    server.get("/health")
    assert noted(server, log, 2)[1]["route"] == "/health"


def test_nothing_is_made_for_a_log_that_is_off(server: RunningServer, log: Records) -> None:
    logging.getLogger("paceline").setLevel(logging.WARNING)
    server.completion()
    assert log.records == []


@pytest.mark.parametrize("path", [
    "/v1/%0a2026-01-01 fake line", "/v1/models/%0d%0aset-cookie:%20x", "/%22%20status=200"])
def test_a_path_cannot_forge_a_line(server: RunningServer, log: Records, path: str) -> None:
    with connect(server.port) as connection:
        connection.sendall(head(path.replace(" ", "%20"), {"connection": "close"}, "GET"))
        assert b" 404 " in read_all(connection).split(b"\r\n")[0] + b" "
    (fields,) = noted(server, log)
    assert fields["route"].isprintable() and " " not in fields["route"] and '"' not in fields["route"]


@pytest.mark.parametrize("given", [b"a\x00b", b"a\x7fb", b"\xc3\xa4", b"a b", b"", b"x" * 129])
def test_an_id_that_could_forge_a_header_or_a_line_is_replaced(
    server: RunningServer, log: Records, given: bytes
) -> None:
    with connect(server.port) as connection:
        beginning = head("/nothing", {"connection": "close"}, "GET").removesuffix(b"\r\n")
        connection.sendall(beginning + b"x-request-id: " + given + b"\r\n\r\n")
        answer = read_all(connection)
    if b" 400 " in answer:
        return    # the parser did not take it for a header at all
    (fields,) = noted(server, log)
    assert len(fields["id"]) == 32 and fields["id"].encode() in answer
    assert json.dumps(fields["id"]) == f'"{fields["id"]}"'

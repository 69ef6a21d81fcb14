"""Streams: the sequence of chunks, their bytes, and how they end."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from paceline.errors import RequestError
from paceline.request import FinishReason

from .conftest import MODEL, RunningServer
from .fake_engine import saying
from .raw import connect, json_request, read_until

USER = {"role": "user", "content": "hi"}
LONG = {"max_tokens": 200, "ignore_eos": True}


def events(response: httpx.Response) -> list[Any]:
    """The events of a whole stream, [DONE] checked and left out."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = response.text.split("\n\n")
    assert parts.pop() == "" and all(part.startswith("data: ") and "\n" not in part for part in parts)
    payloads = [part.removeprefix("data: ") for part in parts]
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]


def test_the_sequence_of_a_chat(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("ab"))
    chunks = events(server.chat(stream=True))
    envelope = {key: value for key, value in chunks[0].items() if key != "choices"}
    assert envelope.pop("id").startswith("chatcmpl-") and isinstance(envelope.pop("created"), int)
    assert envelope == {"object": "chat.completion.chunk", "model": MODEL, "system_fingerprint": "fake-f32"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "a"}, None),
            ({"content": "b"}, None),
            ({}, "stop"),
        ]
    ]


def test_the_sequence_of_a_completion(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("ab"))
    chunks = events(server.completion(stream=True))
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
        for text, reason in [("a", None), ("b", None), ("", "stop")]
    ]


@pytest.mark.parametrize("fields", [
    {}, {"n": 3}, {"stop": "fox"}, {"temperature": 1, "seed": 5, "n": 2}, {"max_tokens": 40}, {"max_tokens": 1}])
def test_a_stream_says_what_the_whole_answer_says(server: RunningServer, fields: dict[str, Any]) -> None:
    whole = server.chat(**fields).json()
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = events(server.chat(**fields, **options, stream=True))
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for chunk in chunks:
        assert chunk["usage"] is None
        [choice] = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
        if choice["finish_reason"] is not None:
            assert choice["index"] not in reasons, "two finish reasons"
            reasons[choice["index"]] = choice["finish_reason"]
    expected = {one["index"]: (one["message"]["content"], one["finish_reason"]) for one in whole["choices"]}
    assert {index: (texts[index], reasons[index]) for index in texts} == expected


def test_several_prompts_stream_by_index(server: RunningServer) -> None:
    fields: dict[str, Any] = {"prompt": ["abc", [1, 2]], "n": 2, "echo": True, "max_tokens": 3}
    whole = server.completion(**fields).json()
    texts = [""] * 4
    for chunk in events(server.completion(**fields, stream=True)):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_echo_alone_streams_too(server: RunningServer) -> None:
    fields: dict[str, Any] = {"prompt": "abc", "echo": True, "max_tokens": 0, "stream": True}
    chunks = events(server.completion(**fields, stream_options={"include_usage": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["abc", ""]
    assert chunks[-1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_comes_only_when_asked_for(server: RunningServer, options: Any) -> None:
    chunks = events(server.chat(stream=True, stream_options=options))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize(("stream", "options"), [
    (False, {"include_usage": True}), (False, {}), (True, {"include_usage": "yes"}), (True, {"include_usage": 1}),
    (True, "x"), (True, [1]), (True, {"continuous_usage_stats": True})])
def test_stream_options_misused_are_refused(server: RunningServer, stream: bool, options: Any) -> None:
    response = server.chat(stream=stream, stream_options=options)
    assert response.status_code == 400, response.text


def test_characters_are_sent_whole_and_held_text_is_not_lost(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("é🙂 \"\n\\ <sto"))
    chunks = events(server.chat(stream=True, stop="<stop>", max_tokens=50))
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert contents == ["", "é", "🙂", " ", '"', "\n", "\\", " ", "<sto", None]    # held back until it cannot match


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_a_limit_inside_a_character_ends_both_alike(server: RunningServer, max_tokens: int) -> None:
    server.on_loop(setattr, server.engine, "script", saying("🙂", ends=False))
    [choice] = server.completion(max_tokens=max_tokens).json()["choices"]
    chunks = events(server.completion(stream=True, max_tokens=max_tokens))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


def test_no_text_past_a_stop_string_is_sent(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("one STOP two", ends=False))
    chunks = events(server.completion(stream=True, stop="STOP", max_tokens=50))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_every_event_is_a_write_of_its_own(server: RunningServer) -> None:
    with server.client.stream("POST", f"{server.url}/v1/completions",
                              json={"prompt": "hi", "stream": True, "max_tokens": 5}) as response:
        chunks = list(response.iter_raw())
    # The kernel may join writes; it never joins what the transfer coding has split.
    assert b"".join(chunks).count(b"\n\n") == 7
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 5}))
        body = read_until(connection, b"\r\n0\r\n\r\n").partition(b"\r\n\r\n")[2]
    sizes, rest = [], body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        sizes.append(int(size, 16))
        event, rest = rest[:sizes[-1]], rest[sizes[-1] + 2:]
        assert event.count(b"\n\n") == (1 if sizes[-1] else 0)
    assert len(sizes) == 8    # five texts, the finish, [DONE], the end


def test_the_openai_client_streams(server: RunningServer) -> None:
    client = server.openai()
    stream = client.chat.completions.create(
        model=MODEL, messages=[USER], stream=True, max_tokens=5, temperature=0,  # type: ignore
        stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    pieces = [piece.choices[0].text for piece in client.completions.create(model=MODEL, prompt="hi", stream=True)]
    assert len("".join(pieces)) == 16


def test_a_failure_after_the_start_is_an_event_and_the_end(server: RunningServer) -> None:
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", {"prompt": "hi", "stream": True} | LONG))
        server.until(lambda: server.engine.submitted)
        server.on_loop(server.engine.step)
        read_until(connection, b"\n\n")
        server.on_loop(server.engine.finish_all, FinishReason.ERROR)
        rest = read_until(connection, b"\r\n0\r\n\r\n")
    assert b"[DONE]" not in rest
    error = json.loads(rest.partition(b"data: ")[2].partition(b"\n\n")[0])["error"]
    assert error == {"message": "the step that computed this request failed", "type": "server_error", "param": None,
                     "code": "generation_failed"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.ABORT, 503)])
def test_a_failure_before_the_start_has_a_status(
    server: RunningServer, stream: bool, reason: FinishReason, status: int
) -> None:
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", {"prompt": "hi", "stream": stream} | LONG))
        server.until(lambda: server.engine.submitted)
        server.on_loop(server.engine.finish_all, reason)
        answer = read_until(connection, b"}}")
    assert answer.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hi", ["a", "b"]])
def test_a_stream_that_ends_without_a_reason_is_no_success(server: RunningServer, stream: bool, prompt: Any) -> None:
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", LONG | {"prompt": prompt, "stream": stream}))
        server.until(lambda: server.engine.submitted)
        server.on_loop(server.engine.close_all)
        assert read_until(connection, b"}}").startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_400(server: RunningServer, stream: bool) -> None:
    server.on_loop(setattr, server.engine, "submit_error", RequestError("prompt: does not fit the cache", "prompt"))
    response = server.completion(stream=stream)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


def test_a_failure_of_one_prompt_ends_the_call(server: RunningServer) -> None:
    server.on_loop(server.engine.hold)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", {"prompt": ["a", "b", "c"]} | LONG))
        server.until(lambda: len(server.engine.submitted) == 3)
        server.on_loop(server.engine.abort, server.engine.submitted[1].request_id)
        answer = read_until(connection, b"}}")
        assert answer.startswith(b"HTTP/1.1 503 ")
        server.until(lambda: server.engine.num_unfinished == 0)

"""Reports against other servers that are about the whole way from a body to its answer; docs/bugs.md names each."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.engine.messages import Submit
from paceline.model.dummy import END_TOKEN, END_TOKEN_ID

from .conftest import RunningServer
from .fake_engine import saying
from .raw import connect, json_request, read_all
from .test_fields import BAD_VALUES
from .test_stream import events

CRAB = "🦀".encode()


def streamed(server: RunningServer, **fields: Any) -> tuple[str, str]:
    """Text and finish reason of a streamed completion."""
    chunks = events(server.completion(stream=True, **fields))
    return "".join(chunk["choices"][0]["text"] for chunk in chunks), chunks[-1]["choices"][0]["finish_reason"]


def whole(server: RunningServer, **fields: Any) -> tuple[str, str]:
    (choice,) = server.completion(**fields).json()["choices"]
    return choice["text"], choice["finish_reason"]


@pytest.mark.parametrize("num_prompt_bytes", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_is_not_sent_again(server: RunningServer, num_prompt_bytes: int) -> None:
    server.engine.script = saying(CRAB[num_prompt_bytes:] + b"ok")
    fields = {"prompt": list(b"x" + CRAB[:num_prompt_bytes])}
    text, _ = whole(server, **fields)
    assert text == CRAB[num_prompt_bytes:].decode(errors="replace") + "ok"    # what was generated, and nothing else
    assert streamed(server, **fields)[0] == text
    assert "x" not in text and "🦀" not in text


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_special_token_that_stops_cuts_no_text(server: RunningServer, ask: Any) -> None:
    server.engine.script = saying("the end|>")
    expected = ("the end|>", "stop")
    assert ask(server, ignore_eos=True, stop_token_ids=[END_TOKEN_ID]) == expected
    assert ask(server, ignore_eos=True, stop=[END_TOKEN]) == expected    # spelled out, it means the token
    assert ask(server) == expected


@pytest.mark.parametrize("ask", [whole, streamed])
def test_text_that_spells_a_special_token_stops_as_text_does(server: RunningServer, ask: Any) -> None:
    server.engine.script = saying(f"before{END_TOKEN}after")    # as letters: one byte is one token here
    assert ask(server, max_tokens=50, stop=[END_TOKEN]) == ("before", "stop")


def outlasting(submit: Submit, choice_index: int, position: int) -> int:
    """Prompt 0 says much and the others little; choice 1 ends before choice 0."""
    length = 12 - 4 * submit.prompt_index - 2 * choice_index
    return (b"A" if choice_index == 0 else b"B")[0] + 2 * submit.prompt_index if position < length else END_TOKEN_ID


def test_choices_stand_in_prompt_order_though_the_first_ends_last(server: RunningServer) -> None:
    server.engine.script = outlasting
    fields = {"prompt": ["a", "b", "c"], "n": 2}
    expected = ["A" * 12, "B" * 10, "C" * 8, "D" * 6, "E" * 4, "F" * 2]
    choices = server.completion(**fields).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in choices] == expected
    texts, ends = [""] * 6, []
    for chunk in events(server.completion(stream=True, **fields)):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == expected and ends == [5, 4, 3, 2, 1, 0]    # a stream tells each end when it comes


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, value, _ in BAD_VALUES if name != "stream"])
def test_a_stream_is_refused_as_a_whole_answer_is_and_the_connection_ends(
    server: RunningServer, name: str, value: Any
) -> None:
    fields = {"prompt": "x", name: value}
    refused = server.post("/v1/completions", fields)
    with connect(server.port) as connection:
        connection.sendall(json_request("/v1/completions", fields | {"stream": True}, {"connection": "close"}))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")    # returns: the server has closed
    assert int(head.split()[1]) == refused.status_code == 400
    assert body == refused.content

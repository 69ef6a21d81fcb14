"""`return_token_ids`: ids beside the text, whole or in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.model.dummy import END_TOKEN_ID

from .conftest import RunningServer
from .fake_engine import saying

MESSAGES = [{"role": "user", "content": "hi"}]


def chunks_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("stop", [None, ["o"], ["never said"]])
@pytest.mark.parametrize("text", ["hello", "🦀 and 🐙"])
def test_ids_of_a_stream_join_to_those_of_the_whole_answer(
    server: RunningServer, text: str, stop: list[str] | None
) -> None:
    server.engine.script = saying(text)
    fields = {"prompt": ["ab", "c"], "n": 2, "return_token_ids": True, "stop": stop, "max_tokens": 50}
    answer = server.completion(**fields).json()
    ids: list[list[int]] = [[], [], [], []]
    prompts: list[list[list[int]]] = [[], [], [], []]
    for chunk in chunks_of(server.completion(**fields, stream=True).text):
        (choice,) = chunk["choices"]
        ids[choice["index"]] += choice["token_ids"]
        prompts[choice["index"]] += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert ids == [choice["token_ids"] for choice in answer["choices"]]
    assert sum(map(len, ids)) == answer["usage"]["completion_tokens"]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [list(b"ab"), list(b"ab"), [99], [99]]
    assert prompts == [[list(b"ab")], [list(b"ab")], [[99]], [[99]]]    # once a choice
    if stop is None:
        assert ids[0] == [*text.encode(), END_TOKEN_ID]


def test_a_chat_has_its_prompts_ids_beside_its_choices(server: RunningServer) -> None:
    server.engine.script = saying("hello")
    answer = server.chat(return_token_ids=True).json()
    prompt_ids = list(server.engine.submitted[-1].prompt_token_ids)
    assert answer["prompt_token_ids"] == prompt_ids
    assert answer["choices"][0]["token_ids"] == [*b"hello", END_TOKEN_ID]
    role, *others = chunks_of(server.chat(return_token_ids=True, stream=True,
                                          stream_options={"include_usage": True}).text)
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert role["prompt_token_ids"] == prompt_ids and role["choices"][0]["token_ids"] == []
    assert [i for one in others for choice in one["choices"] for i in choice["token_ids"]] == [*b"hello", END_TOKEN_ID]
    assert not any("prompt_token_ids" in one for one in others) and others[-1]["usage"]["completion_tokens"] == 6


def test_without_the_field_nothing_is_added(server: RunningServer) -> None:
    for response in (server.completion(), server.completion(stream=True, return_token_ids=False), server.chat()):
        assert "token_ids" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_has_the_prompts_ids_only(server: RunningServer, stream: bool) -> None:
    response = server.completion(prompt="ab", echo=True, max_tokens=0, return_token_ids=True, stream=stream)
    choices = [one["choices"][0] for one in (chunks_of(response.text) if stream else [response.json()])]
    assert [one["prompt_token_ids"] for one in choices if "prompt_token_ids" in one] == [list(b"ab")]
    assert all(one["token_ids"] == [] for one in choices)


def test_of_several_candidates_the_ids_are_those_of_the_answered_ones(server: RunningServer) -> None:
    answer = server.completion(prompt="ab", n=2, best_of=4, temperature=1, seed=3, max_tokens=6, return_token_ids=True)
    for choice in answer.json()["choices"]:
        assert bytes(choice["token_ids"]).decode() == choice["text"] and len(choice["token_ids"]) == 6

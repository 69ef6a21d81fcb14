"""POST /v1/chat/completions, one answer in one piece, and what messages may be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from .conftest import MODEL, RunningServer, StartServer
from .fake_engine import FakeModel, saying

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "so "}


def prompt_text(server: RunningServer) -> str:
    """What the last request's prompt says."""
    submit = server.engine.submitted[-1]
    return server.engine.model.tokenizer.decode(submit.prompt_token_ids)


def test_the_envelope_is_openais(server: RunningServer) -> None:
    server.on_loop(setattr, server.engine, "script", saying("hello"))
    body = server.chat(max_tokens=20).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    num_prompt_tokens = len("user: hi\nassistant: ")
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": "fake-f32",
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 6,
            "total_tokens": num_prompt_tokens + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_the_openai_client_reads_it(server: RunningServer) -> None:
    answer = server.openai().chat.completions.create(model=MODEL, messages=[USER], max_tokens=5, n=2)  # type: ignore
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.finish_reason == "length" and choice.message.role == "assistant" for choice in answer.choices)


@pytest.mark.parametrize("missing", [{"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": None}])
def test_without_a_limit_the_rest_of_the_context_is_used(server: RunningServer, missing: dict[str, None]) -> None:
    body = server.chat(**missing).json()
    assert body["usage"]["total_tokens"] == 256
    assert body["choices"][0]["finish_reason"] == "length"


def test_the_newer_token_limit_wins(server: RunningServer) -> None:
    assert server.chat(max_tokens=3, max_completion_tokens=5).json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_no_tokens_at_all_are_refused(server: RunningServer, field: str) -> None:
    assert server.chat(**{field: 0}).status_code == 400


def test_the_chat_is_tokenised_without_special_tokens(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    tokenizer, encode = server.engine.model.tokenizer, server.engine.model.tokenizer.encode

    def watched(text: str, add_special_tokens: bool) -> list[int]:
        calls.append(add_special_tokens)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", watched)
    server.chat()
    server.chat(add_special_tokens=True)
    assert calls == [False, True]


def test_text_parts_are_joined_by_newlines(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    server.chat(messages=[{"role": "user", "content": parts}])
    assert prompt_text(server) == "user: a\nb\nassistant: "


def test_developer_is_read_as_system(server: RunningServer) -> None:
    server.chat(messages=[{"role": "developer", "content": "be kind"}, USER])
    assert prompt_text(server) == "system: be kind\nuser: hi\nassistant: "


def test_an_answer_can_be_sent_back_as_it_came(server: RunningServer) -> None:
    client = server.openai()
    message = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=5).choices[0].message  # type: ignore
    history = [USER, message.model_dump(), USER]
    response = server.chat(messages=history)
    assert response.status_code == 200 and "x-paceline-ignored" not in response.headers


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, "user: hi\nassistant: so "),
    ({"continue_final_message": True}, "user: hi\nassistant: so "),
    ({"continue_final_message": True, "add_generation_prompt": False}, "user: hi\nassistant: so "),
    ({"add_generation_prompt": True}, "user: hi\nassistant: so \nassistant: "),
    ({"continue_final_message": False}, "user: hi\nassistant: so \nassistant: "),
    ({"add_generation_prompt": False}, "user: hi\nassistant: so \n"),
])
def test_a_last_message_of_the_assistant(server: RunningServer, fields: dict[str, bool], expected: str) -> None:
    assert server.chat(messages=[USER, ASSISTANT], **fields).status_code == 200
    assert prompt_text(server) == expected


def test_text_parts_are_continued_too(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    server.chat(messages=[USER, {"role": "assistant", "content": parts}])
    assert prompt_text(server) == "user: hi\nassistant: one\ntwo"


@pytest.mark.parametrize(("messages", "fields"), [
    ([USER, ASSISTANT], {"continue_final_message": True, "add_generation_prompt": True}),
    ([USER], {"continue_final_message": True}),
    ([USER, ASSISTANT, ASSISTANT], {}),
])
def test_contradictory_turns_are_refused(server: RunningServer, messages: list[Any], fields: dict[str, bool]) -> None:
    assert server.chat(messages=messages, **fields).status_code == 400


@pytest.mark.parametrize("messages", [
    None, "x", 5, {}, [], [123], ["x"], [None], [[]], [{}], [{"role": "user"}], [{"content": "x"}],
    [{"role": 5, "content": "x"}], [{"role": None, "content": "x"}], [{"role": "robot", "content": "x"}],
    [{"role": ["user"], "content": "x"}], [{"role": "user", "content": 5}], [{"role": "user", "content": None}],
    [{"role": "user", "content": []}], [{"role": "user", "content": {}}], [{"role": "user", "content": [5]}],
    [{"role": "user", "content": ["x"]}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "user", "content": "x", "name": 5}], [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_message_is_refused(server: RunningServer, messages: Any, stream: bool) -> None:
    response = server.chat(messages=messages, stream=stream)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "messages" and error["message"].startswith("messages")
    assert not server.engine.submitted


def test_what_the_template_refuses_is_refused(start_server: StartServer) -> None:
    from paceline.model.chat_template import ChatTemplate

    model = FakeModel(chat_template=ChatTemplate("{{ raise_exception('roles must alternate') }}"))
    response = start_server(model).chat()
    assert response.status_code == 400 and "roles must alternate" in response.json()["error"]["message"]


def test_a_template_that_hides_the_last_message_cannot_continue_it(start_server: StartServer) -> None:
    from paceline.model.chat_template import ChatTemplate

    server = start_server(FakeModel(chat_template=ChatTemplate("always the same")))
    assert server.chat().status_code == 200
    assert server.chat(messages=[USER, ASSISTANT]).json()["error"]["param"] == "continue_final_message"


def test_a_model_without_a_template_says_so(start_server: StartServer) -> None:
    server = start_server(dataclasses.replace(FakeModel(), chat_template=None))
    error = server.chat().json()["error"]
    assert "chat template" in error["message"] and error["code"] == "no_chat_template"


def test_a_chat_too_long_is_refused(server: RunningServer) -> None:
    response = server.chat(messages=[{"role": "user", "content": "x" * 300}], stream=True)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"

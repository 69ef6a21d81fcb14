"""What a chat request may hand to the chat template: variables, reasoning, and where it is trusted a template."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.model.chat_template import ChatTemplate

from .conftest import RunningServer, StartServer
from .fake_engine import FakeModel
from .test_chat import ASSISTANT, USER, prompt_text

THINKING = ChatTemplate(
    "{% for m in messages %}{{ m.role[0] }}:{{ '(' + m.reasoning_content + ')' if m.reasoning_content }}"
    "{{ m.content }} {% endfor %}{{ 'quick' if enable_thinking is false else 'slow' }} {{ bos_token }}")


@pytest.fixture
def thinker(start_server: StartServer) -> RunningServer:
    return start_server(FakeModel(chat_template=THINKING))


def test_variables_reach_the_template(thinker: RunningServer) -> None:
    assert thinker.chat().status_code == 200 and prompt_text(thinker) == "u:hi slow "
    for nothing in ({}, None):
        assert thinker.chat(chat_template_kwargs=nothing).status_code == 200 and prompt_text(thinker) == "u:hi slow "
    response = thinker.chat(chat_template_kwargs={"enable_thinking": False, "bos_token": "<B>"})
    assert response.status_code == 200 and prompt_text(thinker) == "u:hi quick <B>"
    assert "x-paceline-ignored" not in response.headers


def test_variables_the_template_does_not_read_are_told(thinker: RunningServer, start_server: StartServer) -> None:
    response = thinker.chat(chat_template_kwargs={"enable_thinking": False, "self": 1, "context": [{}]})
    assert response.status_code == 200 and prompt_text(thinker) == "u:hi quick "
    assert response.headers["x-paceline-ignored"] == "chat_template_kwargs.self, chat_template_kwargs.context"
    strict = start_server(FakeModel(chat_template=THINKING), strict_fields=True)
    assert strict.chat(chat_template_kwargs={"enable_thinking": True}).status_code == 200
    error = strict.chat(chat_template_kwargs={"enable_thinkin": True}).json()["error"]
    assert error["param"] == "chat_template_kwargs" and "enable_thinkin" in error["message"]


@pytest.mark.parametrize(("value", "said"), [
    ("x", "an object"), ([1], "an object"), (5, "an object"), (True, "an object"), ({"messages": []}, "messages"),
    ({"tools": []}, "tools are not supported"), ({"add_generation_prompt": True}, "the request's field"),
    ({"continue_final_message": True}, "the request's field"),
])
def test_variables_that_are_none_are_refused(thinker: RunningServer, value: Any, said: str) -> None:
    response = thinker.chat(chat_template_kwargs=value)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "chat_template_kwargs" and said in error["message"]
    assert error["message"].startswith("chat_template_kwargs") and not thinker.engine.submitted


def test_a_variable_the_template_cannot_use_is_a_400(start_server: StartServer) -> None:
    server = start_server(FakeModel(chat_template=ChatTemplate("{{ 'a' + style }}{{ messages[0].content }}")))
    assert server.chat(chat_template_kwargs={"style": "b"}).status_code == 200
    for value in (5, None, ["x"]):
        response = server.chat(chat_template_kwargs={"style": value})
        assert response.status_code == 400 and "chat template failed" in response.json()["error"]["message"]


def test_reasoning_sent_back_is_the_templates_affair(thinker: RunningServer) -> None:
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert thinker.chat(messages=[USER, thought, USER]).status_code == 200
    assert prompt_text(thinker) == "u:hi a:(2+2)4 u:hi slow "
    assert thinker.chat(messages=[USER, thought | {"reasoning_content": ""}, USER]).status_code == 200
    for wrong in (thought | {"reasoning_content": 5}, USER | {"reasoning_content": "x"}):
        error = thinker.chat(messages=[wrong, USER]).json()["error"]
        assert error["param"] == "messages" and "messages[0].reasoning_content" in error["message"]


def test_a_continued_message_ends_where_a_trimming_template_ends_it(start_server: StartServer) -> None:
    server = start_server(FakeModel(chat_template=ChatTemplate(
        "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")))
    assert server.chat(messages=[USER, ASSISTANT]).status_code == 200 and prompt_text(server) == "[hi][so"


def test_a_template_in_the_request_needs_a_server_that_trusts_it(server: RunningServer) -> None:
    error = server.chat(chat_template="{{ messages[0].content }}").json()["error"]
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")
    assert "--trust-request-chat-template" in error["message"]


def test_a_trusted_request_brings_its_template(start_server: StartServer) -> None:
    server = start_server(trust_request_chat_template=True)
    fields = {"chat_template": "{{ greeting }}, {{ messages[0].content }}!", "chat_template_kwargs": {"greeting": "Oh"}}
    assert server.chat(**fields).status_code == 200 and prompt_text(server) == "Oh, hi!"
    assert server.chat().status_code == 200 and prompt_text(server) == "user: hi\nassistant: "
    for source, said in (("\n{% for %}", "chat_template, line 2"), ("{{ x | nothing }}", "chat_template, line 1"),
                         (5, "a string"), ("", "at least 1"), ("x" * (1 << 20) + "x", "at most")):
        error = server.chat(chat_template=source).json()["error"]
        assert error["param"] == "chat_template" and error["message"].startswith("chat_template")
        assert said in error["message"]
    error = server.chat(chat_template="{% for i in range(9 ** 9) %}{% endfor %}").json()["error"]
    assert "Range too big" in error["message"]


def test_so_chats_a_model_that_has_no_template(start_server: StartServer) -> None:
    server = start_server(FakeModel(chat_template=None), trust_request_chat_template=True)
    assert server.chat().json()["error"]["code"] == "no_chat_template"
    assert server.chat(chat_template="{{ messages[0].content }}").status_code == 200 and prompt_text(server) == "hi"

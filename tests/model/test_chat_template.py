"""Chat templates: byte-equal to transformers (goldens), sandboxed, bounded, and a bad request when they refuse."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError, RequestError, Unsupported
from paceline.model.chat_template import ChatTemplate, require_chat_template
from paceline.model.loader import open_model
from tests.golden import nasty

from . import tiny

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_tokenizer.json").read_text())
USER = [{"role": "user", "content": "x"}]
SPECIALS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>"}
TEMPLATES = {name: ChatTemplate(source, SPECIALS) for name, source in nasty.TEMPLATES.items()}


@pytest.mark.parametrize("golden", GOLDEN["chats"], ids=lambda golden: golden["template"])
def test_prompts_equal_transformers(golden: dict[str, Any]) -> None:
    template = TEMPLATES.get(golden["template"]) or require_chat_template(open_model("smollm2").chat_template)
    arguments = golden["messages"], golden["add_generation_prompt"], golden.get("tools")
    if golden["prompt"] is None:
        with pytest.raises(RequestError):
            template.render(*arguments)
    else:
        assert template.render(*arguments) == golden["prompt"]


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, True, **variables)


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}", "{{ namespace(_x=1) }}", "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ dict.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{{ messages[0].foo.bar }}", "{{ 1 / 0 }}",
    "{{ messages + 1 }}", "{{ none.x.y }}", "{{ 'a' | int + 'b' }}", "{{ open('/etc/passwd') }}",
    "{% include '/etc/passwd' %}",
])
def test_a_template_that_misbehaves_is_a_bad_request(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{{ j }}{% endfor %}{% endfor %}",
    "{% for i in range(10 ** 9) %}{% endfor %}", "{{ 'a' * 10 ** 12 }}", "{{ [1] * 10 ** 12 }}",
    "{{ 10 ** (10 ** 10) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(999) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
])
def test_a_template_that_never_ends_is_stopped(source: str) -> None:
    started = time.perf_counter()
    with pytest.raises(RequestError):
        render(source)
    assert time.perf_counter() - started < 10


def test_the_budget_of_loops_is_per_render() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}ok")
    assert [template.render(USER, True) for _ in range(20)] == ["ok"] * 20


def test_loops_keep_their_variables() -> None:
    source = "{% for k, v in {'a': 1, 'b': 2}.items() if v > 0 %}{{ k }}{{ v }}{{ loop.index }}/{{ loop.length }}" \
             "{{ loop.last }}{{ loop.previtem }}{% else %}none{% endfor %}{% for x in y %}{% else %}empty{% endfor %}"
    assert render(source) == "a11/2Falseb22/2True('a', 1)empty"


@pytest.mark.parametrize("messages", [
    [], [1], [{}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}], ["x"], [None],
    [{"role": "user", "content": [5]}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"text": "x"}]}], [{"role": "user", "content": {"type": "text", "text": "x"}}],
])
def test_malformed_messages_are_a_bad_request(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ messages }}", messages)
    assert caught.value.param == "messages"


def test_parts_are_joined_or_given_as_the_template_needs() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{% for m in messages %}{{ m.content }}{% endfor %}", parts) == "a\nb"
    loop = "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}<{{ p.text }}>{% endfor %}{% endfor %}"
    assert render(loop, parts) == "<a><b>"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(Unsupported, match=r"messages\[0\].content\[0\]: type 'image_url' is not supported"):
        render(loop, image)


def test_null_content_is_left_out_or_empty() -> None:
    chat = [{"role": "assistant", "content": None}]
    assert render("{{ messages[0].content is defined }}", chat) == "False"
    assert render("{{ messages[0]['role'] + messages[0]['content'] }}", chat) == "assistant"
    assert chat == [{"role": "assistant", "content": None}]


def test_variables_and_the_clock_reach_the_template() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }} {{ bos_token }} {{ enable_thinking }}", SPECIALS,
                            now=lambda: datetime(2026, 2, 3))
    assert template.render(USER, True, enable_thinking=False) == "03 Feb 2026 <|im_start|> False"


def test_a_template_for_tools_is_chosen_when_there_are_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(USER, True) == "plain" and template.render(USER, True, tools=[]) == "tools"
    with pytest.raises(ModelError, match="none is named 'default'"):
        ChatTemplate({"rag": "x"})


def test_a_template_that_does_not_compile_is_a_bad_model() -> None:
    with pytest.raises(ModelError, match="chat template, line 2"):
        ChatTemplate("\n{% for %}")


def test_a_model_without_template_refuses_chat() -> None:
    with pytest.raises(RequestError, match="no chat template") as caught:
        require_chat_template(None)
    assert caught.value.code == "no_chat_template"


def test_templates_of_a_directory_in_order_of_precedence(tmp_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "templates")
    assert require_chat_template(open_model(str(directory)).chat_template).sources == {"default": tiny.TEMPLATE}
    named = {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    assert require_chat_template(open_model(str(directory)).chat_template).render(USER, True, tools=[]) == "t"
    (directory / "chat_template.jinja").write_text("file")
    assert require_chat_template(open_model(str(directory)).chat_template).render(USER, True) == "file"
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text("{}")
    assert open_model(str(directory)).chat_template is None

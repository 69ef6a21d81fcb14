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
from tests.golden import chat_cases, nasty

from . import tiny

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_tokenizer.json").read_text())
CHAT_GOLDEN = json.loads(chat_cases.GOLDEN_PATH.read_text())["rows"]
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


@pytest.mark.parametrize("name", chat_cases.TEMPLATES)
def test_every_template_renders_as_transformers_does(name: str) -> None:
    template = ChatTemplate(chat_cases.TEMPLATES[name], chat_cases.SPECIALS, now=lambda: chat_cases.NOW)
    rows = [row for row in CHAT_GOLDEN if row["template"] == name]
    assert len(rows) > 20
    for row in rows:
        case = chat_cases.CASES[row["case"]]
        arguments = (case["messages"], row["mode"] == "open", case.get("tools"), case.get("variables"),
                     row["mode"] == "continued")
        if row["prompt"] is None:
            with pytest.raises(RequestError):
                template.render(*arguments)
        else:
            assert template.render(*arguments) == row["prompt"], (row["case"], row["mode"])


def test_the_goldens_cover_every_template_and_every_case() -> None:
    assert [(row["template"], row["case"], row["mode"]) for row in CHAT_GOLDEN] == [
        (row["template"], row["case"], row["mode"]) for row in chat_cases.rows()]


def render(source: str, messages: Any = USER) -> str:
    return ChatTemplate(source).render(messages, True)


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
    "{% set ns = namespace(x=9) %}{% for i in range(999) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(100000) %}{% set x = 'a' * 10 ** 6 %}{% endfor %}",
    *(f"{{% set ns = namespace(x='aa') %}}{{% for i in range(999) %}}{{% set ns.x = {grown} %}}{{% endfor %}}"
      for grown in ("ns.x | replace('a', 'aa')", "ns.x.replace('a', 'aa')", "ns.x.join('aaaa')", "[ns.x] * 3 | join",
                    "['a', 'a', 'a'] | join(ns.x)", "'%s%s' | format(ns.x, ns.x)", "'%s%s' % (ns.x, ns.x)",
                    "'%(a)s%(a)s' % {'a': ns.x}", "'{}{}'.format(ns.x, ns.x)", "'{x}{x}'.format_map({'x': ns.x})",
                    "ns.x.translate({97: ns.x})", "ns.x | wordwrap(1, wrapstring=ns.x)", "ns.x | indent(ns.x, true)",
                    "('www.a.com ' * 9) | urlize(target=ns.x)")),
    *("{{ " + huge + " }}" for huge in (
        "'a' | center(10 ** 10)", "'a'.ljust(10 ** 10)", "'a'.rjust(10 ** 10)", "'a'.zfill(10 ** 10)",
        "'\\t'.expandtabs(10 ** 10)", "'a' | indent(10 ** 10)", "'%10000000000d' % 1", "'%*d' % (10 ** 10, 1)",
        "'%10000000000d' | format(1)", "'{:>10000000000}'.format(1)", "'{:>{}}'.format(1, 10 ** 10)",
        "[1] | batch(10 ** 10) | list",
        "[1] | slice(10 ** 10) | list", "1.5 | round(10 ** 10, 'ceil')", "messages | tojson(indent=10 ** 10)",
        "'{0.a[{1}]}'.format(1, 10 ** 10)", "lipsum(10 ** 10)")),
])
def test_a_template_that_never_ends_is_stopped(source: str) -> None:
    started = time.thread_time()    # of this thread alone: other work on the machine is not its fault
    with pytest.raises(RequestError):
        render(source)
    assert time.thread_time() - started < 10


def test_a_template_has_ten_seconds_whatever_it_does_with_them() -> None:
    seconds = iter(range(1000))
    slow = ChatTemplate("{% for i in range(100) %}{{ i }} {% endfor %}", monotonic=lambda: float(next(seconds)))
    with pytest.raises(RequestError, match="ran for more than 10 seconds"):
        slow.render(USER, True)
    assert next(seconds) == 12      # asked once at the start and on each turn


def test_what_only_looks_large_is_rendered() -> None:
    source = "{{ '100% * 2' }} {{ '%5.2f|%-3s|%%' % (2.5, 'x') }} {{ '{{{0:>3}}} {1}'.format(7, 'y') }} " \
             "{{ 'a,b'.split(',') | join('; ') }} {{ 'a\nb' | indent(2) }} {{ 2.345 | round(2) }} " \
             "{{ [1, 2, 3] | batch(2) | list }}"
    assert render(source) == "100% * 2  2.50|x  |% {  7} y a; b a\n  b 2.35 [[1, 2], [3]]"


def test_a_long_chat_is_far_from_the_bounds() -> None:
    """The slowest way a template may put a prompt together, on ten thousand messages."""
    source = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content %}{% endfor %}" \
             "{{ ns.x }}"
    assert render(source, [{"role": "user", "content": "x" * 50}] * 10_000) == "x" * 500_000


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
    assert template.render(USER, True, variables={"enable_thinking": False}) == "03 Feb 2026 <|im_start|> False"


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

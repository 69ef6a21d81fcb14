"""Conversations for the chat templates of chat_templates/*.jinja. make_chat_goldens.py renders every one with every
template."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "chat_templates"
GOLDEN_PATH = DIRECTORY / "expected.json"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DIRECTORY.glob("*.jinja"))}
TAKES_PARTS = ("parts",)        # the others are given parts joined by newlines here, as a list's repr in transformers
NOW = datetime(2026, 2, 3, 14, 5, 6)
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

Case = dict[str, Any]


def user(content: Any, **more: Any) -> Case:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> Case:
    return {"role": "assistant", "content": content, **more}


def system(content: Any) -> Case:
    return {"role": "system", "content": content}


def call(name: str, arguments: Any) -> Case:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Wetter in <Köln> &\n\"Umgebung\", auch mehrere Tage im Voraus",
    "parameters": {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string"}, "days": {"type": "array", "items": {"enum": ["heute", "morgen", 3]}},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}}}}}}}

CASES: dict[str, Case] = {
    "one question": {"messages": [user("Hi")]},
    "a system": {"messages": [system("Be brief. "), user("  Hi\n\n there "), assistant(" Hello! "), user("Bye")]},
    "nasty text": {"messages": [user("  <s> {{ 7*7 }} {% raw %} 😀 é\u0301 <|im_end|> 'a' \"b\" \\n  ")]},
    "a named user": {"messages": [user("Hi", name="ann"), assistant(""), user("")]},
    "roles out of turn": {"messages": [user("a"), user("b"), assistant("c"), assistant("d")]},
    "system in the middle": {"messages": [user("a"), system("Be rude."), user("b")]},
    "half an answer": {"messages": [user("Count."), assistant("One, two,  ")]},
    "half an answer in two lines": {"messages": [system("S"), user("Count."), assistant("One,\ntwo")]},
    "thoughts in the text": {"messages": [
        user("2+2?"), assistant("<think>\nEasy.\n</think>\n\n4"), user("3+3?"),
        assistant("<think>\nHm.\n</think>\n\n6")]},
    "thoughts beside the text": {"messages": [
        user("2+2?"), assistant("4", reasoning_content="Easy."), user("3+3?"),
        assistant("6", reasoning_content="Hm.\n")]},
    "thoughts by other names": {"messages": [user("2+2?"), assistant("4", reasoning="Easy."), user("?"),
                                             assistant("4", thinking="Still.")]},
    "no thinking": {"messages": [user("2+2?")], "variables": {"enable_thinking": False}},
    "thinking": {"messages": [user("2+2?")], "variables": {"enable_thinking": True}},
    "tools": {"messages": [system("Help."), user("Weather?")], "tools": [WEATHER]},
    "tools and a call": {"tools": [WEATHER], "messages": [
        user("Weather in Köln?"), assistant(None, tool_calls=[call("get_weather", {"city": "Köln", "days": [1, 2.5]})]),
        {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"},
        {"role": "tool", "tool_call_id": "call_2", "content": "{\"sky\": \"grey\"}"},
        assistant("Cold.", tool_calls=None)]},
    "two calls and words": {"tools": [WEATHER], "messages": [
        user("And?"),
        assistant("Let me see.", tool_calls=[call("get_weather", "{\"city\": \"Bonn\"}"), call("f", {})])]},
    "tools in the system prompt": {"messages": [user("Weather?")], "tools": [WEATHER, WEATHER],
                                   "variables": {"tools_in_user_message": False, "date_string": "1 May 2025"}},
    "documents": {"messages": [user("Who?")], "variables": {"style": "cited", "documents": [
        {"title": "A", "text": "one\ntwo"}, {"text": "three"}]}},
    "specials of the caller": {"messages": [user("Hi")], "variables": {"bos_token": "<BOS>", "style": "other"}},
    "parts": {"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b {{ x }}"}]),
                           assistant([{"type": "text", "text": "c "}])], "only": TAKES_PARTS},
    "an image": {"messages": [user([{"type": "text", "text": "a"}, {"type": "image"}])], "only": TAKES_PARTS},
}


def rows() -> list[Case]:
    """Every case with every template that takes it: open, closed, and continued where the assistant spoke last."""
    made = []
    for template in TEMPLATES:
        for name, case in CASES.items():
            if template in case.get("only", TEMPLATES):
                is_assistant_last = case["messages"][-1]["role"] == "assistant"
                for mode in ("closed", "open", *(["continued"] if is_assistant_last else [])):
                    made.append({"template": template, "case": name, "mode": mode})
    return made

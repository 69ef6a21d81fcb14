"""Request files: JSON lines of Asked, the same file for every target. Wrong lines are told by their number.

By hand a line needs one prompt and a length: {"prompt": "...", "num_output_tokens": 64}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import orjson

from ..errors import ConfigError, EngineError
from .drafts import Part, TokenWriter, WordWriter
from .records import Asked

SALT_TOKENS = 8
PROMPTS = ("prompt_token_ids", "prompt", "messages")
NAMES = {field.name for field in fields(Asked)}


def read_requests(path: str | Path) -> list[Asked]:
    """Raises ConfigError naming file and line for whatever is no request, for equal ids and for dangling `after`."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    found: list[Asked] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            asked = parse_asked(orjson.loads(line), f"line-{number}")
            if asked.request_id in seen:
                raise ValueError(f"request_id: {asked.request_id!r} stands in a line above")
            if missing := [name for name in asked.after if name not in seen]:
                raise ValueError(f"after: no line above has the request_id {missing[0]!r}")
        except ValueError as error:    # orjson's own is one
            raise ConfigError(f"{path}:{number}: {error}: {line[:100].decode(errors='replace')}") from error
        seen.add(asked.request_id)
        found.append(asked)
    if not found:
        raise ConfigError(f"{path}: a file without requests")
    return found


def write_requests(path: str | Path, requests: Iterable[Asked]) -> None:
    """Raises EngineError where the file cannot be written."""
    try:
        with Path(path).open("wb") as file:
            for asked in requests:
                file.write(orjson.dumps(plain(asked)) + b"\n")
    except OSError as error:
        raise EngineError(f"{path}: cannot be written: {error.strerror}") from error


def plain(asked: Asked) -> dict[str, Any]:
    """Without the fields that say nothing."""
    return {field.name: value for field in fields(Asked)
            if (value := getattr(asked, field.name)) is not None and value != field.default}


def parse_asked(line: Any, request_id: str) -> Asked:
    """One line, parsed. Raises ValueError saying what is wrong."""
    if not isinstance(line, dict):
        raise ValueError("expected an object")
    if unknown := sorted(set(line) - NAMES):
        raise ValueError(f"{unknown[0]}: no such field; there are {', '.join(sorted(NAMES))}")
    told = {name: value for name, value in line.items() if value is not None}
    if sum(name in told for name in PROMPTS) != 1:
        raise ValueError(f"expected exactly one of {', '.join(PROMPTS)}")
    if "num_output_tokens" not in told:
        raise ValueError("num_output_tokens: missing")
    for name, value in told.items():
        told[name] = READERS[name](name, value)
    if "prompt_token_ids" in told:
        told.setdefault("num_prompt_tokens", len(told["prompt_token_ids"]))
    return Asked(**{"request_id": request_id} | told)


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _count(name: str, value: Any) -> int:
    if not _is_whole(value, 1):
        raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
    return int(value)


def _seconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name}: expected seconds, 0 or more, got {value!r}")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: expected a text that is not empty")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(_is_whole(one, 0) for one in value):
        raise ValueError(f"{name}: expected a list of token ids, whole numbers of at least 0")
    return tuple(value)


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name}: expected a list of request ids")
    return tuple(value)


def _messages(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    is_fine = isinstance(value, list) and value and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one for one in value)
    if not is_fine:
        raise ValueError(f"{name}: expected a list of objects with role and content")
    return tuple(value)


READERS: dict[str, Callable[[str, Any], Any]] = {
    "request_id": _text, "num_output_tokens": _count, "num_prompt_tokens": _count, "prompt_token_ids": _token_ids,
    "prompt": _text, "messages": _messages, "arrival_seconds": _seconds, "after": _names, "think_seconds": _seconds,
    "tenant": _text, "slo": _text}


def salted(requests: Sequence[Asked], salt: str, first_id: int, end_id: int) -> list[Asked]:
    """The same with a few tokens of the salt in front, so that no earlier run has left these prompts in a cache.
    Prompts that share a beginning among themselves still do."""
    part = [Part(("salt",), SALT_TOKENS)]
    ids = TokenWriter(salt, first_id, end_id).fields(part)["prompt_token_ids"]
    words = WordWriter(salt).text(part)
    return [_salted(asked, ids, words) for asked in requests]


def _salted(asked: Asked, ids: tuple[int, ...], words: str) -> Asked:
    num_prompt = None if asked.num_prompt_tokens is None else asked.num_prompt_tokens + SALT_TOKENS
    if asked.prompt_token_ids is not None:
        return replace(asked, prompt_token_ids=ids + asked.prompt_token_ids, num_prompt_tokens=num_prompt)
    if asked.prompt is not None:
        return replace(asked, prompt=f"{words} {asked.prompt}", num_prompt_tokens=num_prompt)
    assert asked.messages is not None
    first, *rest = asked.messages
    content = first["content"]
    if isinstance(content, str):
        content = f"{words} {content}"
    elif isinstance(content, list):
        content = [{"type": "text", "text": words}, *content]
    return replace(asked, messages=({**first, "content": content}, *rest), num_prompt_tokens=num_prompt)

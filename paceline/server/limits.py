"""What a request body may be, checked before anything is built from it: size, media type, nesting, strict JSON.

Duplicate keys: the last one wins, as in most JSON parsers. A body never costs more than a small multiple of its bytes:
the number of arrays, objects and strings is limited, since those are what blows up in memory.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from ..errors import RequestError
from .replies import HttpError

READ_IDLE_SECONDS = 30.0       # a body that stops arriving for so long is given up: 408
MIN_BODY_BYTES_PER_SECOND = 1024    # beyond that, a body that arrives more slowly than this too
MAX_JSON_PARTS = 100_000       # arrays and objects, or strings, in one body
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
JSON_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}:,]', re.DOTALL)
MAX_BLAMED_CHARS = 1 << 20     # how far into a body the field at fault is looked for


async def read_object(request: Request, max_body_bytes: int, max_json_depth: int) -> dict[str, Any]:
    """The request's body as a JSON object, or the failure that says which limit it broke."""
    check_media_type(request.headers)
    body = await read_body(request, max_body_bytes)
    return parse_object(body, max_json_depth)


def check_media_type(headers: Headers) -> None:
    """JSON in UTF-8, not compressed. No content type at all is taken for JSON."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise _unsupported(f"content-encoding {encoding[:40]!r} is not accepted; send plain JSON")
    kind, _, parameters = headers.get("content-type", "").lower().partition(";")
    kind = kind.strip()
    is_json = kind in ("", "application/json") or (kind.startswith("application/") and kind.endswith("+json"))
    charset = re.search(r'charset\s*=\s*"?([^\s;"]*)', parameters)
    if not is_json:
        raise _unsupported(f"content-type {kind[:40]!r} is not accepted; send application/json")
    if charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        raise _unsupported(f"charset {charset[1][:40]!r} is not accepted; send UTF-8")


def _unsupported(message: str) -> HttpError:
    return HttpError(415, message, "unsupported_media_type")


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """All bytes of the body; stops reading at the limit, whether the length was announced or not."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_body_bytes:
        raise _too_large(max_body_bytes)
    parts: list[bytes] = []
    num_bytes, started_at = 0, asyncio.get_running_loop().time()
    while True:
        message = await _next_message(request, started_at, num_bytes)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_body_bytes:
            raise _too_large(max_body_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _next_message(request: Request, started_at: float, num_bytes: int) -> Any:
    """The next part. A client that sends byte by byte is given up as well as one that sends nothing."""
    latest = started_at + num_bytes / MIN_BODY_BYTES_PER_SECOND + READ_IDLE_SECONDS
    try:
        async with asyncio.timeout_at(min(latest, asyncio.get_running_loop().time() + READ_IDLE_SECONDS)):
            return await request.receive()
    except TimeoutError:
        message = (f"the body arrives too slowly: nothing for {READ_IDLE_SECONDS:g} seconds, or fewer than "
                   f"{MIN_BODY_BYTES_PER_SECOND} bytes a second after that")
        raise HttpError(408, message, "request_timeout", headers={"Connection": "close"}) from None


def _too_large(max_body_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than the limit of {max_body_bytes} bytes", "request_too_large")


def parse_object(body: bytes, max_json_depth: int) -> dict[str, Any]:
    """Strict JSON (no NaN, no infinities, no lone surrogates, UTF-8) whose top level is an object."""
    if not body.strip():
        raise RequestError("body: empty; send a JSON object")
    check_nesting(body, max_json_depth)
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _bad_json(body, error) from None
    if not isinstance(parsed, dict):
        raise RequestError("body: must be a JSON object at the top level")
    return parsed


def check_nesting(body: bytes, max_depth: int) -> None:
    """Refuses deep nesting and masses of tiny values without parsing; works at memory speed on large bodies."""
    num_openers, num_quotes = body.count(b"[") + body.count(b"{"), body.count(b'"')
    if num_openers <= max_depth and num_quotes <= 2 * MAX_JSON_PARTS:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * MAX_JSON_PARTS:
        raise RequestError(f"body: more than {MAX_JSON_PARTS} strings")
    brackets = b"".join(plain.split(b'"')[::2]).translate(None, NOT_BRACKETS)
    if brackets.count(b"[") + brackets.count(b"{") > MAX_JSON_PARTS:
        raise RequestError(f"body: more than {MAX_JSON_PARTS} arrays and objects")
    depth = deepest = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > max_depth:
        raise RequestError(f"body: JSON is nested {deepest} levels deep; the limit is {max_depth}")


def _bad_json(body: bytes, error: orjson.JSONDecodeError) -> RequestError:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as bad:
        field = field_at(body[:bad.start].decode("utf-8"))
        return RequestError(f"{field or 'body'}: not UTF-8: bad byte at offset {bad.start}", field)
    field = field_at(text[:error.pos])
    return RequestError(f"{field or 'body'}: not valid JSON: {error.msg} (character {error.pos})", field)


def field_at(text: str) -> str | None:
    """The top-level field in whose value this beginning of a JSON object ends."""
    if len(text) > MAX_BLAMED_CHARS:
        return None
    depth, last_string, field = 0, None, None
    for match in JSON_TOKEN.finditer(text):
        token = match[0]
        if token[0] == '"':
            last_string = token[1:-1]
        elif token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
            field = field if depth else None
        elif depth == 1:
            field = last_string if token == ":" else None
    return field if field is None else field[:64]

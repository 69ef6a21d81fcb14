"""What every request passes first: a request id, CORS, the key. Deny by default: only OPEN_PATHS need no key."""

from __future__ import annotations

import hmac
import logging
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .replies import HttpError, as_http_error

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})    # compared with the path exactly as sent
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
CORS_HEADERS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-expose-headers", b"x-request-id, x-paceline-ignored, retry-after"),
]
PREFLIGHT_HEADERS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-id, *"),
    (b"access-control-max-age", b"600"),
    (b"content-length", b"0"),
]
LOGGER = logging.getLogger("paceline.server")


class Access:
    """Middleware around the whole app, failures and unknown routes included."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        answer = Answer(send, _request_id(headers), b"origin" in headers)
        if scope["method"] == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers:
            await answer({"type": "http.response.start", "status": 200, "headers": PREFLIGHT_HEADERS})
            await answer({"type": "http.response.body", "body": b""})
        elif self._is_allowed(scope["path"], headers):
            await self._pass_on(scope, receive, answer)
        else:
            await _denied(b"authorization" in headers or b"x-api-key" in headers).response()(scope, receive, answer)

    async def _pass_on(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        """Answers a failure that nobody expected here: above us the connection would be cut without notice."""
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            if answer.has_begun:
                raise
            LOGGER.exception("a request failed: %s %r", scope["method"], scope["path"][:200])
            await as_http_error(error).response()(scope, receive, answer)

    def _is_allowed(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if self._api_key is None or path in OPEN_PATHS:
            return True
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        keys = [token.strip()] if scheme.lower() == b"bearer" else []
        keys.append(headers.get(b"x-api-key", b""))
        return sum(hmac.compare_digest(key, self._api_key) for key in keys) > 0    # a sum: both are compared


def _denied(has_key: bool) -> HttpError:
    how = "Authorization: Bearer KEY, or X-Api-Key: KEY"
    message = "the API key is wrong" if has_key else f"an API key is needed: {how}"
    return HttpError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    given = headers.get(b"x-request-id", b"")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


class Answer:
    """`send` with the headers that every answer has. Knows whether the answer has begun."""

    def __init__(self, send: Send, request_id: bytes, has_origin: bool) -> None:
        self._send = send
        self._headers = [(b"x-request-id", request_id), *(CORS_HEADERS if has_origin else ())]
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if not self.has_begun:
            self.has_begun = True
            names = {name for name, _ in self._headers}
            kept = [header for header in message.get("headers", ()) if header[0] not in names]
            message = {**message, "headers": [*kept, *self._headers]}
        await self._send(message)

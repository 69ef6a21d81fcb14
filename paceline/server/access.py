"""What every request passes first: a request id, CORS, the key, and a line in the log when it is done.

Deny by default: once there is a key only OPEN_PATHS need none, and what lies under /admin needs the admin key.
"""

from __future__ import annotations

import logging
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .keys import KeyRing
from .replies import HttpError, as_http_error
from .request_log import NOTE, RequestNote

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})    # compared with the path exactly as sent
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
CORS_HEADERS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-expose-headers", b"x-request-id, x-paceline-ignored, x-paceline-queue-seconds, "
     b"x-paceline-prefill-seconds, x-paceline-decode-seconds, x-paceline-preemptions, retry-after"),
]
PREFLIGHT_HEADERS = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-id, *"),
    (b"access-control-max-age", b"600"),
    (b"content-length", b"0"),
]
PLAIN_SEND = "paceline.send"    # in the scope: the server's own `send`, for parts of an answer that has begun
LOGGER = logging.getLogger("paceline.server")


class Access:
    """Middleware around the whole app, failures and unknown routes included."""

    def __init__(self, app: ASGIApp, keys: KeyRing, has_open_metrics: bool = False) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = OPEN_PATHS | ({"/metrics"} if has_open_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _request_id(headers)
        note = scope[NOTE] = RequestNote(request_id.decode("ascii"), scope["method"], scope["path"])
        scope[PLAIN_SEND] = send
        answer = Answer(send, request_id, b"origin" in headers)
        try:
            await self._answer(scope, receive, answer, headers)
        finally:
            note.write(answer.status)

    async def _answer(self, scope: Scope, receive: Receive, answer: Answer, headers: dict[bytes, bytes]) -> None:
        if scope["method"] == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers:
            await answer({"type": "http.response.start", "status": 200, "headers": PREFLIGHT_HEADERS})
            await answer({"type": "http.response.body", "body": b""})
        elif (denial := self._denial(scope, headers)) is None:
            await self._pass_on(scope, receive, answer)
        else:
            await denial.response()(scope, receive, answer)

    async def _pass_on(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        """Answers a failure that nobody expected here: above us the connection would be cut without notice."""
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            if answer.has_begun:
                raise
            LOGGER.exception("a request failed: %s %r", scope["method"], scope["path"][:200])
            await as_http_error(error).response()(scope, receive, answer)

    def _denial(self, scope: Scope, headers: dict[bytes, bytes]) -> HttpError | None:
        path, keys = scope["path"], self._keys
        secrets = _secrets(headers)
        if path == "/admin" or path.startswith("/admin/"):
            if keys.admin is None:
                return HttpError(403, "/admin is closed: this server was started without an admin key", "admin_closed")
            return None if keys.is_admin(secrets) else _denied("admin key", bool(secrets))
        if not keys.keys or path in self._open_paths:
            return None
        key = keys.find(secrets)
        if key is None:
            return _denied("API key", bool(secrets))
        note: RequestNote = scope[NOTE]
        note.tenant, note.owner, note.is_admin = key.tenant, key.owner, key is keys.admin
        return None


def _secrets(headers: dict[bytes, bytes]) -> list[bytes]:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    secrets = [token.strip()] if scheme.lower() == b"bearer" else []
    return [*secrets, headers[b"x-api-key"]] if b"x-api-key" in headers else secrets


def _denied(kind: str, has_key: bool) -> HttpError:
    how = "Authorization: Bearer KEY, or X-Api-Key: KEY"
    message = f"the {kind} is wrong" if has_key else f"an {kind} is needed: {how}"
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
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.status = message.get("status")
            names = {name for name, _ in self._headers}
            kept = [header for header in message.get("headers", ()) if header[0] not in names]
            message = {**message, "headers": [*kept, *self._headers]}
        await self._send(message)

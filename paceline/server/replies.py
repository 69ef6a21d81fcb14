"""JSON answers and the one shape of every failure: {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from ..errors import EngineDead, EngineError, Overloaded, RequestError, Unsupported

ERROR_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}                                          # every other status: invalid_request_error


class HttpError(EngineError):
    """A failure that already knows its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def as_http_error(error: Exception) -> HttpError:
    """Which status and which code a failure has."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError):
        code = error.code or ("unsupported_parameter" if isinstance(error, Unsupported) else None)
        return HttpError(400, str(error), code, error.param)
    if isinstance(error, Overloaded):
        return HttpError(429, str(error), "overloaded", headers={"Retry-After": str(error.retry_after_seconds)})
    if isinstance(error, EngineDead):
        return HttpError(503, str(error) or "the engine has stopped", "engine_unavailable")
    return HttpError(500, "internal error; the server's log has the details", "internal_error")


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def shown(value: Any, max_chars: int = 80) -> str:
    """A client's value for an error message, short enough to repeat."""
    if isinstance(value, str):
        value = value[:max_chars + 1]      # before repr: the value may be megabytes
    elif isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}" if value else repr(value)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= max_chars else text[:max_chars] + "..."

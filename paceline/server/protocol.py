"""The connection, with the limits that uvicorn's HTTP parser lacks: bytes, headers and seconds for the head of a
request, and seconds for a client to take what was written for it.

Answers unparsable requests in JSON, and does not read for ever from a client whose answer has already been sent.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .replies import HttpError

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
HEAD_SECONDS = 20.0        # for the whole head of a request, from its first byte or from connecting
LINGER_SECONDS = 5.0       # for the rest of a body whose request was refused, so that the client reads the refusal
WRITE_STALL_SECONDS = 30.0    # for a client that stopped reading, from its buffer (64 KB) full until it has drained


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)    # type: ignore[arg-type]
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        _disarm(self._head_timer)
        _disarm(self._linger_timer)
        _disarm(self._write_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not keep up. If it never does, its request must not hold memory for ever."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        _disarm(self._write_timer)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection is closed, and cut if its client does not even take the last bytes."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes", "head_too_large")

    def on_message_begin(self) -> None:
        if self._head_timer is None:
            self._arm_head_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_head_bytes = 0
        _disarm(self._head_timer)
        self._head_timer = None
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes", "head_too_large")
            return
        if len(self.headers) > MAX_HEADERS:
            self._refuse(431, f"the request has {len(self.headers)} headers; the limit is {MAX_HEADERS}",
                         "too_many_headers")
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        _disarm(self._linger_timer)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _arm_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_took_too_long)

    def _head_took_too_long(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm_head_timer()    # an earlier request of this connection is still being answered
        elif not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(400, msg, "bad_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        body = orjson.dumps(HttpError(status, message, code).body())
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()


def _disarm(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()

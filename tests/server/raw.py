"""Requests as bytes over a plain socket, for what no client library would send."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

SOCKET_SECONDS = 20


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SOCKET_SECONDS)


def head(path: str, headers: Mapping[str, Any], method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: test", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def json_request(path: str, body: Mapping[str, Any], headers: Mapping[str, Any] | None = None) -> bytes:
    encoded = json.dumps(body).encode()
    return head(path, {"content-type": "application/json", "content-length": len(encoded), **(headers or {})}) + encoded


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        part = connection.recv(65536)
        assert part, f"closed before {mark!r}; got {received[-500:]!r}"
        received += part
    return received


def exchange(port: int, request: bytes) -> tuple[int, dict[str, Any]]:
    """Sends it, reads one answer with a content length: status and JSON body."""
    with connect(port) as connection:
        connection.sendall(request)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    received = read_until(connection, b"\r\n\r\n")
    answer_head, _, body = received.partition(b"\r\n\r\n")
    lengths = [line for line in answer_head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    assert lengths, answer_head
    while len(body) < int(lengths[0].split(b":")[1]):
        body += connection.recv(65536)
    return int(answer_head.split()[1]), json.loads(body)

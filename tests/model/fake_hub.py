"""A hub on a real socket: repositories as dicts of bytes, tokens, and connections that break when told to."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


@dataclass
class Repository:
    """private_to: the token it wants. breaks: file -> how many of its next downloads end after half of the bytes."""

    files: dict[str, bytes]
    private_to: str | None = None
    is_gated: bool = False
    revisions: tuple[str, ...] = ("main", "v1")
    breaks: dict[str, int] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        return hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(self.files.items()))).hexdigest()


class FakeHub:
    """`downloads` lists (file, first byte) of every GET of a file."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.downloads: list[tuple[str, int]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self, has_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, has_body=False)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, has_body: bool) -> None:
        parts = unquote(request.path.partition("?")[0]).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo_id, revision, name = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main", None
        else:
            repo_id, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        repository = self.repositories.get(repo_id)
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or repository.private_to not in (None, token):
            refuse(request, 401, "GatedRepo" if repository is not None and repository.is_gated else "RepoNotFound")
        elif revision not in (*repository.revisions, repository.commit):
            refuse(request, 404, "RevisionNotFound")
        elif name is None:
            listing = [{"rfilename": file, "size": len(data)} for file, data in repository.files.items()]
            send(request, json.dumps({"id": repo_id, "sha": repository.commit, "siblings": listing}).encode(), has_body)
        elif name not in repository.files:
            refuse(request, 404, "EntryNotFound")
        else:
            self._send_file(request, repository, name, has_body)

    def _send_file(self, request: BaseHTTPRequestHandler, repository: Repository, name: str, has_body: bool) -> None:
        data = repository.files[name]
        start = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        request.send_response(206 if start else 200)
        request.send_header("X-Repo-Commit", repository.commit)
        request.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        request.send_header("Accept-Ranges", "bytes")
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        if not has_body:
            return
        self.downloads.append((name, start))
        if repository.breaks.get(name, 0):
            repository.breaks[name] -= 1
            request.wfile.write(data[start : start + (len(data) - start) // 2])
            request.close_connection = True
            return
        request.wfile.write(data[start:])


def send(request: BaseHTTPRequestHandler, body: bytes, has_body: bool) -> None:
    request.send_response(200)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if has_body:
        request.wfile.write(body)


def refuse(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    request.send_response(status)
    request.send_header("X-Error-Code", code)
    request.send_header("Content-Length", "0")
    request.end_headers()

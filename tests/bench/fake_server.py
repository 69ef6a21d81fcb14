"""A server with known delays, faults and manners, on a real socket in a thread of its own. It writes down when it sent
what, on the same monotonic clock as its clients.

  python -m tests.bench.fake_server 0.2 0.02    # by itself: seconds to the first token, and between tokens
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

WAIT_SECONDS = 20
EXTENSIONS = ("continuous_usage_stats", "return_token_ids", "min_tokens", "ignore_eos", "include_usage")


@dataclass(kw_only=True)
class Script:
    """How one request is answered. `ends`: done, drop (the connection breaks off after num_chunks), no-done, error (an
    event that tells one), garbage (an event that is no JSON), hold (nothing more until released), or open (the answer
    is whole, and the body does not end)."""

    status: int = 200
    says: str = "as the script has it"
    first_seconds: float = 0.0
    gap_seconds: float = 0.0
    tokens_per_chunk: int = 1
    num_tokens: int | None = None          # None: as asked
    num_chunks: int | None = None          # stop after so many, as `ends` says
    ends: str = "done"
    finish_reason: str = "length"
    cached_tokens: int | None = None


@dataclass
class Manners:
    """What the server takes and tells."""

    takes: tuple[str, ...] = EXTENSIONS
    takes_ids: bool = True
    knows_usage: bool = True
    is_tgi: bool = False
    streams: bool = True
    metrics: str | None = None


@dataclass
class Seen:
    """One request as the server had it."""

    path: str
    body: dict[str, Any]
    connection: int
    came_at: float
    chunk_times: list[float] = field(default_factory=list)    # before each write


ScriptOf = Callable[[dict[str, Any]], Script]    # by the body of a request


class FakeServer:
    def __init__(self, script: ScriptOf | None = None, manners: Manners | None = None) -> None:
        self.script = script or (lambda body: Script())
        self.manners = manners or Manners()
        self.seen: list[Seen] = []
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._is_up.wait(WAIT_SECONDS)

    @property
    def asked(self) -> list[Seen]:
        """Without the tiny requests that find out its manners."""
        return [one for one in self.seen if one.body.get("max_tokens") != 3
                and one.body.get("parameters", {}).get("max_new_tokens") != 3]

    def until(self, predicate: Callable[[], bool]) -> None:
        """Waits until something is true of the server."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(predicate)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result(WAIT_SECONDS)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(WAIT_SECONDS)
            assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped, self._released, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Condition()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/info", self._info)
        app.router.add_get("/metrics", self._metrics)
        for path in ("/v1/completions", "/v1/chat/completions", "/generate_stream"):
            app.router.add_post(path, self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._is_up.set()
        await self._stopped.wait()
        self._released.set()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.Response(status=404) if self.manners.is_tgi else web.json_response({"data": [{"id": "fake"}]})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_id": "fake"}) if self.manners.is_tgi else web.Response(status=404)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(status=404) if self.manners.metrics is None else web.Response(text=self.manners.metrics)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        came_at = time.perf_counter()
        body = orjson.loads(await request.read())
        seen = Seen(request.path, body, id(request.transport), came_at)
        self.seen.append(seen)
        await self._tell()
        if (refusal := self._refusal(body)) is not None:
            return web.json_response({"error": {"message": refusal}}, status=400)
        script = self.script(body)
        if script.status != 200:
            return web.json_response({"error": {"message": script.says}}, status=script.status)
        if not self.manners.streams:
            return web.json_response({"choices": [{"text": "whole"}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            await self._stream(request, response, script, seen)
        return response

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _refusal(self, body: dict[str, Any]) -> str | None:
        options = body.get("stream_options") or {}
        used = {name for name in EXTENSIONS if name in body or name in options}
        if missing := used - set(self.manners.takes):
            return f"{min(missing)} is not known here"
        if isinstance(body.get("prompt"), list) and not self.manners.takes_ids:
            return "prompt must be a string"
        return None

    async def _stream(self, request: web.Request, response: web.StreamResponse, script: Script, seen: Seen) -> None:
        chunks = Chunks(seen, self.manners, script)
        due = seen.came_at + script.first_seconds
        for number, count in enumerate(chunks.counts):
            if script.num_chunks == number:
                break
            while (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            event = chunks.event(number, count)
            seen.chunk_times.append(time.perf_counter())
            await response.write(b"data: " + event + b"\n\n")
            await self._tell()
            due += script.gap_seconds
        match script.ends:
            case "drop":
                assert request.transport is not None
                request.transport.abort()
            case "hold":
                await self._released.wait()
            case "error":
                await response.write(b'data: {"error": {"message": "the step failed"}}\n\n')
            case "garbage":
                await response.write(b"data: {nonsense\n\n")
            case "done" | "open":
                await response.write(chunks.ending())
                if script.ends == "open":
                    await self._released.wait()


class Chunks:
    """The events of one answer, in the words of its route."""

    def __init__(self, seen: Seen, manners: Manners, script: Script) -> None:
        self._script, self._body, self._path = script, seen.body, seen.path
        self._options = seen.body.get("stream_options") or {}
        asked = seen.body.get("max_tokens") or seen.body["parameters"]["max_new_tokens"]
        self._num_tokens = asked if script.num_tokens is None else script.num_tokens
        self._is_told = manners.knows_usage and bool(self._options.get("include_usage"))
        self.counts = [min(script.tokens_per_chunk, self._num_tokens - at)
                       for at in range(0, self._num_tokens, script.tokens_per_chunk)]

    def _usage(self, num_output: int) -> dict[str, Any]:
        prompt = self._body.get("prompt") or self._body.get("messages")
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": num_output}
        if self._script.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._script.cached_tokens}
        return usage

    def event(self, number: int, count: int) -> bytes:
        is_last = number == len(self.counts) - 1
        if self._path == "/generate_stream":
            last = {"generated_text": "all", "details": {"finish_reason": self._script.finish_reason,
                                                        "generated_tokens": self._num_tokens}}
            return orjson.dumps({"token": {"id": 7, "text": "x"}, "generated_text": None} | (last if is_last else {}))
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._script.finish_reason if is_last else None}
        choice |= {"delta": {"content": "x" * count}} if "chat" in self._path else {"text": "x" * count}
        if self._body.get("return_token_ids"):
            choice["token_ids"] = [7] * count
        event: dict[str, Any] = {"choices": [choice]}
        if self._is_told and self._options.get("continuous_usage_stats"):
            event["usage"] = self._usage(sum(self.counts[: number + 1]))
        return orjson.dumps(event)

    def ending(self) -> bytes:
        if self._path == "/generate_stream":
            return b""
        usage = orjson.dumps({"choices": [], "usage": self._usage(self._num_tokens)})
        return (b"data: " + usage + b"\n\n" if self._is_told else b"") + b"data: [DONE]\n\n"


@contextlib.contextmanager
def serving(script: ScriptOf | None = None, **manners: Any) -> Iterator[FakeServer]:
    server = FakeServer(script, Manners(**manners))
    try:
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    first, gap = map(float, sys.argv[1:])
    with serving(lambda body: Script(first_seconds=first, gap_seconds=gap)) as by_itself:
        print(by_itself.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()

"""A real server on a free port, in a thread of this process, with an engine made by `make_engine`.

`make_engine` is the one place that decides which engine the tests run on.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx
import openai
import pytest

from paceline.clock import WallClock
from paceline.config import ServerConfig
from paceline.engine.queue_limits import QueueLimits
from paceline.server.serve import Service

from .fake_engine import FakeEngine, FakeModel, pangram_script

MODEL = "fake-model"
T = TypeVar("T")
WAIT_SECONDS = 20


async def make_engine(config: ServerConfig, model: FakeModel | None) -> FakeEngine:
    return FakeEngine(limits=QueueLimits.of(config), model=model)


class RunningServer:
    """The server, its engine, and ways to reach both from the test's thread."""

    def __init__(self, config: ServerConfig, model: FakeModel | None = None, *, is_loaded: bool = True) -> None:
        self.config = config
        self.engine: FakeEngine
        self.exit_status: int | None = None
        self.error: BaseException | None = None
        self.loading_error: Exception | None = None
        self._model = model
        self._may_load = threading.Event()
        self._is_open = threading.Event()
        self._is_ready = threading.Event()
        self.client = httpx.Client(timeout=WAIT_SECONDS, verify=False)    # one: making a client costs 50 ms
        self._thread = threading.Thread(target=self._run_thread, daemon=True)
        self._thread.start()
        self._wait(self._is_open)
        if is_loaded:
            self.load()

    def load(self) -> None:
        self._may_load.set()
        self._wait(self._is_ready)

    def _wait(self, event: threading.Event) -> None:
        assert event.wait(WAIT_SECONDS), f"the server did not come up: {self.error!r}"

    def _run_thread(self) -> None:
        try:
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self.exit_status = runner.run(self._run())
        except BaseException as error:
            self.error = error
        self._is_open.set()
        self._is_ready.set()

    async def _run(self) -> int:
        self.loop = asyncio.get_running_loop()
        seeds = itertools.count(1000)
        self.service = Service(
            self._make_engine, self.config, MODEL, lambda: next(seeds), WallClock(), {"block_size": "16"})
        return await self.service.run(self._on_event)

    async def _make_engine(self) -> FakeEngine:
        await asyncio.to_thread(self._may_load.wait)
        if self.loading_error is not None:
            raise self.loading_error
        self.engine = await make_engine(self.config, self._model)
        return self.engine

    def _on_event(self, event: str) -> None:
        if event == "ready":
            self._is_ready.set()
        else:
            self.url = event.removeprefix("listening on ")
            self.port = int(self.url.rpartition(":")[2])
            self._is_open.set()

    def on_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Calls it on the server's event loop and returns the result."""

        async def call() -> T:
            return function(*args)

        return self.run(call())

    def run(self, awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result(WAIT_SECONDS)

    def until(self, predicate: Callable[[], Any]) -> None:
        """Waits for something to become true of the engine."""
        self.run(self.engine.until(predicate))

    def stop(self) -> None:
        self.client.close()
        self._may_load.set()
        if self._thread.is_alive():
            for _ in range(2):
                self.loop.call_soon_threadsafe(self.service.ask_to_stop)
        self.join()

    def join(self) -> None:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "the server did not stop"

    def openai(self, **options: Any) -> openai.OpenAI:
        settings = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": WAIT_SECONDS}
        return openai.OpenAI(**{**settings, **options})

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=body, **options)

    def completion(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": "hi", "temperature": 0} | fields)

    def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8}
        return self.post("/v1/chat/completions", body | fields)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(self.url + path, **options)


StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    server = RunningServer(ServerConfig(port=0, grace_seconds=0.0))
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The module's server with its engine as new."""
    engine = shared_server.engine
    engine.script, engine.num_cached_tokens, engine.submit_error, engine.has_stalled = pangram_script, 0, None, False
    engine.submitted.clear()
    engine.aborted.clear()
    yield shared_server
    shared_server.on_loop(engine.release)


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts servers of the test's own, with its own config."""
    servers: list[RunningServer] = []

    def start(model: FakeModel | None = None, is_loaded: bool = True, **knobs: Any) -> RunningServer:
        settings = {"port": 0, "grace_seconds": 0.0}
        servers.append(RunningServer(ServerConfig(**{**settings, **knobs}), model, is_loaded=is_loaded))
        return servers[-1]

    yield start
    for one in servers:
        one.stop()



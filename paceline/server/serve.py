"""One process that serves: binds first, loads, answers, drains on SIGTERM or SIGINT, leaves at once on the second.

While the model loads the port already answers: /health says 503 loading, and so do the other routes. When the engine
has died every open stream is told, /health says 503 dead for a moment, and the process leaves by itself.

Exit status: 0 drained (streams cut at the end of the grace included), 1 a second signal or a dead engine, 2 the
caller's mistake (a bad knob, a model that cannot be served, a port in use).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeAlias

import uvicorn

from .. import logs
from ..clock import Clock
from ..config import ServerConfig
from ..engine import heap
from ..engine.messages import Answer, EngineStats, Outputs, PolicyState, Question, Submit
from ..engine.transport import STDERR
from ..errors import ConfigError, EngineDead
from .app import make_app, served_names
from .engine_port import Engine, EngineInfo, RequestStream, SeedSource, ServedModel
from .protocol import LimitedProtocol
from .reply import LiveReplies

EngineFactory: TypeAlias = Callable[[], Awaitable[Engine]]    # awaited on the loop; heavy work belongs in a thread
KEEP_ALIVE_SECONDS = 65      # longer than the 60 of common load balancers
BACKLOG = 2048
MAX_OPEN_FILES = 65536
CLOSE_SECONDS = 5            # for clients to take the last bytes, after the drain
LOGGER = logging.getLogger("paceline.server")
DEAD_SECONDS = 1.0           # a dead engine's server still answers for so long, for those who ask after its health


class EngineSlot:
    """An engine that may still be loading. Every call goes to the engine once it is there."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._listeners: list[Callable[[Outputs], None]] = []

    def fill(self, engine: Engine) -> None:
        self._engine = engine
        for listener in self._listeners:
            engine.add_listener(listener)

    def _get(self) -> Engine:
        if self._engine is None:
            raise EngineDead("the engine is loading")
        return self._engine

    @property
    def model(self) -> ServedModel:
        return self._get().model

    @property
    def state(self) -> str:
        return "loading" if self._engine is None else self._engine.state

    @property
    def stats(self) -> EngineStats | None:
        return None if self._engine is None else self._engine.stats

    @property
    def policy(self) -> PolicyState | None:
        return None if self._engine is None else self._engine.policy

    @property
    def num_unfinished(self) -> int:
        return 0 if self._engine is None else self._engine.num_unfinished

    def submit(self, message: Submit) -> RequestStream:
        return self._get().submit(message)

    async def ask(self, question: Question) -> Answer:
        return await self._get().ask(question)

    def check_room(self) -> None:
        self._get().check_room()

    async def until_dead(self) -> None:
        await self._get().until_dead()

    def is_stalled(self, limit_seconds: float) -> bool:
        return self._engine is not None and self._engine.is_stalled(limit_seconds)

    def add_listener(self, on_outputs: Callable[[Outputs], None]) -> None:
        self._listeners.append(on_outputs)
        if self._engine is not None:
            self._engine.add_listener(on_outputs)

    async def drain(self, grace_seconds: float) -> None:
        if self._engine is not None:
            await self._engine.drain(grace_seconds)

    async def stop(self) -> None:
        if self._engine is not None:
            await self._engine.stop()


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: those end the process by the signal, and we owe the exit status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Service:
    """The life of one serving process. `run` returns the exit status: 0 drained, 1 told twice to go or engine dead."""

    def __init__(
        self,
        engine_factory: EngineFactory,
        config: ServerConfig,
        model_name: str,
        seed_source: SeedSource,
        clock: Clock,
        engine_info: EngineInfo | None = None,
    ) -> None:
        self.address = ""    # known when the port is open
        self._engine_factory = engine_factory
        self._config = config
        self._slot = EngineSlot()
        app = make_app(self._slot, config, model_name, seed_source, clock, engine_info)
        self._live: LiveReplies = app.state.live_replies
        self._server = QuietServer(uvicorn.Config(
            app, http=LimitedProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
            log_level="error",    # a warning for each piece of garbage would let anybody fill the log
            server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS))
        self._num_stops = 0
        self._stop_asked = asyncio.Event()
        self._stop_insisted = asyncio.Event()

    def ask_to_stop(self) -> None:
        """What a signal does: the first drains, the second cuts. On the event loop."""
        self._num_stops += 1
        (self._stop_asked if self._num_stops == 1 else self._stop_insisted).set()

    @property
    def is_chat_model(self) -> bool:
        return self._slot.model.chat_template is not None

    async def run(self, on_event: Callable[[str], None]) -> int:
        """Serves until asked to stop. `on_event` is told the address when the port is open, and readiness."""
        listener = bind(self._config.host, self._config.port)
        self._watch_signals()
        serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        serving.add_done_callback(lambda _: self._stop_asked.set())    # should it fail, nobody waits for ever
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        self.address = f"http://{host}:{listener.getsockname()[1]}"
        on_event(f"listening on {self.address}")
        try:
            if await self._load():
                on_event("ready")
                await self._either(self._slot.until_dead(), self._stop_asked.wait())
                await self._drain()
        finally:
            self._live.cut_all()
            self._server.should_exit = True
            self._server.force_exit = self._stop_insisted.is_set()
            await self._first_of(serving, self._stop_insisted.wait())
            self._server.force_exit = True
            has_died = self._slot.state == "dead"
            await self._slot.stop()
            await serving
        return 1 if self._stop_insisted.is_set() or has_died else 0

    async def _load(self) -> bool:
        """Waits for the engine; False if asked to stop before it is there. A failed load raises."""
        loading = asyncio.ensure_future(self._engine_factory())
        await self._first_of(loading, self._stop_asked.wait())
        if not loading.done():
            loading.cancel()
            return False
        self._slot.fill(loading.result())
        return True

    async def _drain(self) -> None:
        """Lets what runs come to its end. A dead engine has told its streams already."""
        if self._slot.state == "dead":
            await self._either(asyncio.sleep(DEAD_SECONDS), self._stop_asked.wait())
            return
        draining = asyncio.ensure_future(self._slot.drain(self._config.grace_seconds))
        await self._first_of(draining, self._stop_insisted.wait())
        if draining.done():
            draining.result()
        else:
            draining.cancel()

    async def _first_of(self, work: asyncio.Future[Any], other: Coroutine[Any, Any, object]) -> None:
        """Waits for either; what `other` was is dropped, `work` goes on."""
        waiting = asyncio.ensure_future(other)
        await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def _either(self, *events: Coroutine[Any, Any, object]) -> None:
        """Waits for the first of them."""
        waiting = [asyncio.ensure_future(event) for event in events]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only the main thread may; in any other (tests) there are no signals to watch.
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, self.ask_to_stop)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on that address: who connects from now on is served when the loop runs."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def serve(
    engine_factory: EngineFactory,
    config: ServerConfig,
    model_name: str,
    seed_source: SeedSource,
    clock: Clock,
    engine_info: EngineInfo | None = None,
) -> int:
    """Runs a Service to its end and returns the exit status. Raises what the engine factory raises."""

    async def run() -> int:
        service = Service(engine_factory, config, model_name, seed_source, clock, engine_info)

        def tell(event: str) -> None:
            if event == "ready":
                heap.settle()
            if config.log_format == "json":
                LOGGER.info(event)
                return
            print(f"paceline: {event}", file=sys.stderr, flush=True)
            if event == "ready":
                print(greeting(service.address, served_names(config, model_name)[0], service.is_chat_model),
                      file=sys.stderr, flush=True)

        return await service.run(tell)

    faulthandler.enable(STDERR)
    raise_file_limit()
    with (logs.configured(config.log_format, config.log_level),
          asyncio.Runner(loop_factory=_loop_factory()) as runner):
        return runner.run(run())


def raise_file_limit() -> None:
    """Each client takes a file descriptor, and the usual soft limit of 1024 is soon reached."""
    try:
        import resource
    except ImportError:              # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def greeting(address: str, model_name: str, is_chat_model: bool) -> str:
    """The address, and a request to paste."""
    question = "What is the capital of France? Answer in one sentence."
    if is_chat_model:
        route, asked = "chat/completions", f'"messages": [{{"role": "user", "content": "{question}"}}]'
    else:
        route, asked = "completions", '"prompt": "The capital of France is"'
    return (f"serving {model_name} at {address}\n\n"
            f"  curl {address}/v1/{route} -H 'content-type: application/json' \\\n"
            f"    -d '{{\"model\": \"{model_name}\", {asked}, \"temperature\": 0}}'\n")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:              # Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop

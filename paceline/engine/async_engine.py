"""The engine as an asyncio program sees it: submit a message, iterate what comes back. Owns the open streams and the
queue limit; knows no HTTP and no tensors. Everything here runs on the event loop's thread."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, EngineDead, EngineError, Overloaded
from ..sched.choices import choice_id
from .messages import Abort, Died, EngineStats, News, Outputs, Ready, Rejected, RequestOutput, Stop, Stopped, Submit
from .transport import Transport

OnOutputs = Callable[[Outputs], None]
LOGGER = logging.getLogger("paceline.engine")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What a front needs to turn text into messages and back."""

    tokenizer: Any              # model.tokenizer.Tokenizer
    chat_template: Any          # model.chat_template.ChatTemplate, or None
    max_model_len: int          # tokens of prompt and output together
    eos_token_ids: frozenset[int]
    fingerprint: str
    reads_priority: bool = True    # whether a request's priority changes anything in this engine
    vocab_size: int             # token ids a client may send are below this


class RequestStream(AsyncIterator[RequestOutput]):
    """What becomes of one Submit: the outputs of all its choices as they come. Ends when every choice has finished."""

    def __init__(self, engine: AsyncEngine, message: Submit) -> None:
        self.choice_ids = tuple(choice_id(message.request_id, i) for i in range(message.num_choices))
        self._engine = engine
        self._num_open = message.num_choices
        self._arrived: deque[RequestOutput | EngineError] = deque()
        self._wakeup: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._num_open > 0

    def __aiter__(self) -> RequestStream:
        return self

    def abort(self) -> None:
        """The client has left: the engine forgets the request. Harmless when it has finished."""
        if self.is_open:
            self._engine._abort(self)

    async def __anext__(self) -> RequestOutput:
        while not self._arrived:
            if not self.is_open:
                raise StopAsyncIteration
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup
        output = self._arrived.popleft()
        if isinstance(output, EngineError):
            raise output
        return output

    def take_arrived(self) -> list[RequestOutput]:
        """Everything that has come and was not taken yet, without waiting: lets a slow reader catch up in one write."""
        taken: list[RequestOutput] = []
        while self._arrived and isinstance(self._arrived[0], RequestOutput):
            taken.append(self._arrived.popleft())    # type: ignore[arg-type]
        return taken

    def _deliver(self, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            self._num_open -= 1
        self._arrived.append(output)
        self._wake()

    def _close(self, failure: EngineError | None) -> None:
        self._num_open = 0
        if failure is not None:
            self._arrived.append(failure)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


class AsyncEngine:
    """One engine behind a transport. `state`: loading, ready, draining, dead or stopped."""

    def __init__(self, transport: Transport, make_model: Callable[[Ready], ServedModel], max_queue: int) -> None:
        self.state = "loading"
        self.failure: Died | None = None           # why the engine is dead
        self.notices: tuple[str, ...] = ()
        self.layout: Ready | None = None
        self.stats: EngineStats | None = None
        self.num_unfinished = 0                    # choices submitted and not finished
        self._model: ServedModel | None = None
        self._make_model = make_model
        self._transport = transport
        self._max_queue = max_queue
        self._streams: dict[str, RequestStream] = {}
        self._listeners: list[OnOutputs] = []
        self._last_progress_at = time.monotonic()
        self._finish_times: deque[float] = deque(maxlen=64)
        self._changed = asyncio.Event()

    @property
    def model(self) -> ServedModel:
        """Raises EngineDead while there is none."""
        if self._model is None:
            raise EngineDead(f"the engine is {self.state}")
        return self._model

    async def start(self) -> None:
        """Begins loading; returns at once. Await `ready()` for the end of it."""
        loop = asyncio.get_running_loop()

        def on_news(news: News) -> None:    # called in the transport's thread
            # The tokenizer is built there too, so that the event loop goes on answering /health meanwhile.
            model = None
            if isinstance(news, Ready):
                try:
                    model = self._make_model(news)
                except Exception as failure:    # told like every other death of the engine
                    news = Died(f"{type(failure).__name__}: {failure}")
            loop.call_soon_threadsafe(self._receive, news, model)

        self._transport.start(on_news)

    async def ready(self) -> None:
        """Waits until the engine serves. Raises ConfigError or EngineDead if it never will."""
        while self.state == "loading":
            await self._wait_for_change()
        if self.failure is not None:
            raise (ConfigError if self.failure.is_callers_mistake else EngineDead)(self.failure.reason)

    def submit(self, message: Submit) -> RequestStream:
        """Raises Overloaded when the queue is full, EngineDead when nothing can be served."""
        if self.state != "ready":
            raise EngineDead(f"the engine is {self.state}")
        if self.num_unfinished + message.num_choices > self._max_queue:
            raise Overloaded(
                f"the queue is full: {self.num_unfinished} requests are unfinished, the limit is {self._max_queue}",
                self._retry_after_seconds())
        if not self.num_unfinished:
            self._last_progress_at = time.monotonic()
        stream = RequestStream(self, message)
        self._streams.update(dict.fromkeys(stream.choice_ids, stream))
        self.num_unfinished += message.num_choices
        self._transport.send(message)
        return stream

    def is_stalled(self, limit_seconds: float) -> bool:
        """Work waits and no step has finished for that long."""
        return self.num_unfinished > 0 and time.monotonic() - self._last_progress_at > limit_seconds

    def add_listener(self, on_outputs: OnOutputs) -> None:
        """on_outputs is called on the event loop with every step's Outputs, after the streams got theirs."""
        self._listeners.append(on_outputs)

    async def drain(self, grace_seconds: float) -> None:
        """Takes nothing new; returns when everything accepted has finished, or the grace is over."""
        if self.state == "ready":
            self.state = "draining"
        deadline = time.monotonic() + grace_seconds
        while self.num_unfinished and self.state == "draining" and (left := deadline - time.monotonic()) > 0:
            await self._wait_for_change(left)

    async def stop(self) -> None:
        """Ends the loop. Streams still open are told."""
        is_running = self.state in ("loading", "ready", "draining")
        if is_running:
            self.state = "stopped"
            self._transport.send(Stop(is_graceful=False))
        self._close_streams(EngineDead("the server is shutting down"))
        if is_running and not await asyncio.to_thread(self._transport.join, 10.0):
            self._transport.kill()

    def _abort(self, stream: RequestStream) -> None:
        self._transport.send(Abort((stream.choice_ids[0],)))
        self._forget(stream)
        stream._close(None)

    def _receive(self, news: News, model: ServedModel | None) -> None:
        match news:
            case Outputs():
                self._deliver(news)
            case Ready():
                self._model, self.layout, self.notices = model, news, news.notices
                if self.state == "loading":
                    self.state = "ready"
            case Rejected():
                if (stream := self._streams.get(news.request_id)) is not None:
                    self._forget(stream)
                    stream._close(news.error)
            case Died():
                if self.state != "loading":    # else whoever awaits ready() is told
                    LOGGER.error("paceline: the engine has died: %s", news.reason)
                self.state, self.failure = "dead", news
                self._close_streams(EngineDead(news.reason))
            case Stopped():
                self.state = "stopped"
        self._notify()

    def _deliver(self, news: Outputs) -> None:
        self.stats = news.stats
        self._last_progress_at = time.monotonic()
        for output in news.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue    # aborted meanwhile
            if output.finish_reason is not None:
                del self._streams[output.request_id]
                self.num_unfinished -= 1
                self._finish_times.append(self._last_progress_at)
            stream._deliver(output)
        for listener in self._listeners:
            listener(news)

    def _forget(self, stream: RequestStream) -> None:
        for request_id in stream.choice_ids:
            if self._streams.pop(request_id, None) is not None:
                self.num_unfinished -= 1
        self._notify()

    def _close_streams(self, failure: EngineDead) -> None:
        for stream in set(self._streams.values()):
            stream._close(failure)
        self._streams.clear()
        self.num_unfinished = 0

    def _retry_after_seconds(self) -> int:
        """Time for one place in the queue at the rate at which requests have lately finished; 1 to 60."""
        if len(self._finish_times) < 2:
            return 1
        span_seconds = time.monotonic() - self._finish_times[0]
        return max(1, min(60, math.ceil(span_seconds / len(self._finish_times))))

    def _notify(self) -> None:
        self._changed.set()

    async def _wait_for_change(self, timeout_seconds: float | None = None) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_seconds)
        except TimeoutError:
            return


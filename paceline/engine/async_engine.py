"""The engine as an asyncio program sees it: submit a message, iterate what comes back. Owns the open streams, the queue
limits and the watch over steps that hang; knows no HTTP and no tensors. All of it runs on the event loop's thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from ..clock import Clock
from ..errors import ConfigError, EngineDead, EngineError, RequestError
from ..sched.choices import choice_id
from .messages import (
    Abort,
    Answer,
    Answered,
    Ask,
    Died,
    EngineStats,
    News,
    Outputs,
    PolicyState,
    Question,
    Ready,
    Rejected,
    RequestOutput,
    Stop,
    Stopped,
    Submit,
    Switched,
)
from .queue_limits import Load, QueueGate, QueueLimits
from .transport import Transport

OnOutputs = Callable[[Outputs], None]
LOGGER = logging.getLogger("paceline.engine")
MAX_UNREAD_NEWS = 32      # steps the engine may be ahead of the event loop: bounds memory when clients are many
MAX_LOOK_SECONDS = 5.0    # between two looks whether a step hangs


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
        self.tenant, self.num_prompt_tokens = message.tenant, len(message.prompt_token_ids)
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

    def __init__(
        self,
        transport: Transport,
        make_model: Callable[[Ready], ServedModel],
        limits: QueueLimits,
        clock: Clock,
        step_timeout_seconds: float | None = None,
    ) -> None:
        self.state = "loading"
        self.failure: Died | None = None           # why the engine is dead
        self.notices: tuple[str, ...] = ()
        self.layout: Ready | None = None
        self.stats: EngineStats | None = None
        self.policy: PolicyState | None = None     # in force, as far as the engine has told
        self._model: ServedModel | None = None
        self._make_model = make_model
        self._transport = transport
        self._clock = clock
        self._gate = QueueGate(limits)
        self._step_timeout_seconds = step_timeout_seconds
        self._watch: asyncio.Task[None] | None = None
        self._streams: dict[str, RequestStream] = {}
        self._listeners: list[OnOutputs] = []
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = count()
        self._last_progress_at = clock.now()
        self._unread = threading.Semaphore(MAX_UNREAD_NEWS)
        self._changed = asyncio.Event()
        self._has_died = asyncio.Event()

    @property
    def model(self) -> ServedModel:
        """Raises EngineDead while there is none."""
        if self._model is None:
            raise EngineDead(f"the engine is {self.state}")
        return self._model

    @property
    def num_unfinished(self) -> int:
        """Choices submitted and not finished."""
        return self._gate.num_choices

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
            while not self._unread.acquire(timeout=1.0):    # the engine waits for a front that does not keep up
                if loop.is_closed():
                    return
            with contextlib.suppress(RuntimeError):    # the loop is closed: nobody is left to be told
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
        now = self._clock.now()
        load = Load(message.tenant, message.num_choices, len(message.prompt_token_ids))
        self._gate.check(load, now)
        if not self.num_unfinished:
            self._last_progress_at = now
        stream = RequestStream(self, message)
        self._streams.update(dict.fromkeys(stream.choice_ids, stream))
        self._gate.enter(load)
        self._transport.send(message)
        return stream

    async def ask(self, question: Question) -> Answer:
        """The engine's answer, given between two steps. Raises RequestError where what was asked for cannot be, and
        EngineDead where nobody can answer."""
        if self.state not in ("ready", "draining"):
            raise EngineDead(f"the engine is {self.state}")
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._transport.send(Ask(number, question))
        try:
            return await answer
        finally:
            del self._asked[number]

    def check_room(self) -> None:
        """Raises Overloaded if no request at all would be accepted now."""
        self._gate.check_any(self._clock.now())

    def is_stalled(self, limit_seconds: float) -> bool:
        """Work waits and no step has finished for that long."""
        return self.num_unfinished > 0 and self._clock.now() - self._last_progress_at > limit_seconds

    async def until_dead(self) -> None:
        await self._has_died.wait()

    def add_listener(self, on_outputs: OnOutputs) -> None:
        """on_outputs is called on the event loop with every step's Outputs, after the streams got theirs."""
        self._listeners.append(on_outputs)

    async def drain(self, grace_seconds: float) -> None:
        """Takes nothing new; returns when everything accepted has finished, or the grace is over."""
        if self.state == "ready":
            self.state = "draining"
        try:
            async with asyncio.timeout(grace_seconds):
                while self.num_unfinished and self.state == "draining":
                    await self._wait_for_change()
        except TimeoutError:
            return

    async def stop(self) -> None:
        """Ends the loop. Streams still open are told."""
        if self._watch is not None:
            self._watch.cancel()
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
        self._unread.release()
        if self.state == "dead":
            return    # everybody has been told; a loop that hung may have come back
        match news:
            case Outputs():
                self._deliver(news)
            case Ready():
                self._model, self.layout, self.notices, self.policy = model, news, news.notices, news.policy
                if self.state == "loading":
                    self.state = "ready"
                    self._watch = asyncio.ensure_future(self._end_if_a_step_hangs())
            case Rejected():
                if (stream := self._streams.get(news.request_id)) is not None:
                    self._forget(stream)
                    stream._close(news.error)
            case Answered():
                self._take_answer(news)
            case Died():
                self._die(news)
            case Stopped():
                self.state = "stopped"
        self._notify()

    def _take_answer(self, news: Answered) -> None:
        if isinstance(news.answer, Switched) and self._model is not None:
            self.policy = news.answer.new
            self._model = replace(self._model, reads_priority=news.answer.new.reads_priority)
        answer = self._asked.get(news.number)
        if answer is None or answer.done():
            return    # whoever asked has left
        if isinstance(news.answer, RequestError):
            answer.set_exception(news.answer)
        else:
            answer.set_result(news.answer)

    def _die(self, news: Died) -> None:
        if self.state != "loading":    # else whoever awaits ready() is told
            LOGGER.error("the engine has died: %s", news.reason)
        self.state, self.failure = "dead", news
        self._has_died.set()
        self._close_streams(EngineDead(news.reason))

    async def _end_if_a_step_hangs(self) -> None:
        """A step that takes longer than the limit will not end: the engine is given up, with its stacks on stderr."""
        limit = self._step_timeout_seconds
        was_stalled = False
        while limit is not None and self.state in ("ready", "draining"):
            await asyncio.sleep(min(limit / 4, MAX_LOOK_SECONDS))
            is_stalled = self.is_stalled(limit)
            if is_stalled and was_stalled:    # twice: after a pause of this loop itself, news may lie unread
                self._transport.give_up()
                self._die(Died(f"a step has been running for more than {limit:g} seconds"))
                self._notify()
            was_stalled = is_stalled

    def _deliver(self, news: Outputs) -> None:
        self.stats = news.stats
        self._last_progress_at = self._clock.now()
        for output in news.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue    # aborted meanwhile
            if output.finish_reason is not None:
                self._leave(stream, (output.request_id,))
            stream._deliver(output)
        for listener in self._listeners:
            listener(news)

    def _forget(self, stream: RequestStream) -> None:
        self._leave(stream, [request_id for request_id in stream.choice_ids if request_id in self._streams])
        self._notify()

    def _leave(self, stream: RequestStream, choice_ids: Collection[str]) -> None:
        """These choices of the stream take no place any more; its prompt goes with the last of them."""
        for request_id in choice_ids:
            del self._streams[request_id]
        is_last = not any(request_id in self._streams for request_id in stream.choice_ids)
        num_tokens = stream.num_prompt_tokens if is_last else 0
        self._gate.leave(Load(stream.tenant, len(choice_ids), num_tokens), self._clock.now())

    def _close_streams(self, failure: EngineDead) -> None:
        for stream in set(self._streams.values()):
            self._forget(stream)
            stream._close(failure)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineDead(str(failure)))

    def _notify(self) -> None:
        self._changed.set()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


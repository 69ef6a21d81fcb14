"""Runs a call and writes its answer: one JSON body, or a stream of events. Always ends, whatever happens.

The response starts with the first news, so that a failure before it still gets its proper status. A client that hangs
up ends its request at once, streaming or not. When the server must go, `cut` tells the client and closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import EngineDead
from .access import PLAIN_SEND
from .engine_port import Engine
from .generation import Generation
from .logprobs import ChoiceLogprobs, Entry, joined
from .openai import Answer, Call, answer_of, usage_of
from .prompts import off_loop
from .replies import as_http_error, json_response
from .request_log import note_generation, phases_of
from .sse import DONE, ChunkEvents, error_event
from .token_ids import EventsWithTokenIds, add_to_answer

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
MAX_IGNORED_SHOWN = 20
SHUTTING_DOWN = "the server is shutting down"
LOGGER = logging.getLogger("paceline.server")


class LiveReplies:
    """The replies being written now. At shutdown the last of them are cut, and no other begins."""

    def __init__(self) -> None:
        self._live: set[Reply] = set()
        self._is_closed = False

    def add(self, reply: Reply) -> None:
        """Raises EngineDead after cut_all: a body or a long prompt may have taken until then."""
        if self._is_closed:
            raise EngineDead(SHUTTING_DOWN)
        self._live.add(reply)

    def discard(self, reply: Reply) -> None:
        self._live.discard(reply)

    def __len__(self) -> int:
        return len(self._live)

    def cut_all(self) -> None:
        self._is_closed = True
        for reply in tuple(self._live):
            reply.cut()


class Reply:
    """An ASGI response that generates."""

    def __init__(self, engine: Engine, call: Call, live: LiveReplies) -> None:
        self._engine = engine
        self._call = call
        self._live = live
        self._has_started = False
        self._send_part: Send | None = None    # past the layers that have nothing to do once the answer has begun
        self._cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cut(self) -> None:
        if not self._cut.done():
            self._cut.set_result(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._live.add(self)
        try:
            self._send_part = scope.get(PLAIN_SEND, send)
            generation = Generation(self._engine, self._call)
            try:
                await self._run(generation, receive, send)
            finally:
                note_generation(scope, self._call, generation)
        finally:
            self._live.discard(self)

    async def _run(self, generation: Generation, receive: Receive, send: Send) -> None:
        write = self._write_stream if self._call.is_stream else self._write_body
        work = asyncio.ensure_future(write(generation, send))
        hang_up = asyncio.ensure_future(_client_gone(receive))
        try:
            await asyncio.wait({work, hang_up, self._cut}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not hang_up.done():
                raise EngineDead(SHUTTING_DOWN)
        except Exception as error:
            await _cancelled(work)
            await self._fail(error, send)
        finally:
            hang_up.cancel()
            if not generation.is_finished:
                generation.abort()
            await _cancelled(work)

    async def _write_body(self, generation: Generation, send: Send) -> None:
        texts: list[list[str]] = [[] for _ in generation.choices]
        entries: list[list[Entry]] = [[] for _ in generation.choices]
        async for piece in generation.steps():
            texts[piece.number].append(piece.text)
            entries[piece.number] += piece.entries
        usage = usage_of(self._call, generation.num_completion_tokens, generation.num_cached_tokens)

        def respond() -> Response:
            answers = self._answers(generation, ["".join(text) for text in texts], entries)
            answer = answer_of(self._call, answers, usage)
            if self._call.returns_token_ids:
                add_to_answer(answer, self._call, [generation.choices[number] for number in generation.answered()])
            return json_response(answer, headers=ignored_header(self._call.ignored) | phase_headers(generation))

        response = await off_loop(self._num_logprobs(usage), respond)
        self._has_started = True
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})

    def _answers(
        self, generation: Generation, texts: Sequence[str], entries: Sequence[Sequence[Entry]]
    ) -> list[Answer]:
        """The choices to answer with, from the texts and entries of all that were generated."""
        if not generation.choices:    # nothing was to be generated: the limit of no tokens was reached
            return [Answer(echo, "length") for echo in self._echoes()]
        answers = []
        for number, echo in zip(generation.answered(), self._echoes(), strict=True):
            logprobs = self._logprobs(generation, number)
            told = joined(logprobs.opening(echo), logprobs.of(entries[number]))
            reason = generation.choices[number].finish_reason or "length"
            answers.append(Answer(echo + texts[number], reason, told))
        return answers

    def _num_logprobs(self, usage: Mapping[str, Any]) -> int:
        """How many values the answer tells, at most: the work of telling them."""
        num_top = self._call.num_top_logprobs
        return 0 if num_top is None else (1 + num_top) * self._call.num_choices * int(usage["total_tokens"])

    async def _write_stream(self, generation: Generation, send: Send) -> None:
        events = ChunkEvents(self._call)
        if self._call.returns_token_ids:
            events = EventsWithTokenIds(self._call, generation.choices)
        echoes = self._echoes()
        if not generation.choices:
            await self._send_events(send, self._only_echo(events, echoes))
        opened: dict[int, ChoiceLogprobs] = {}
        async for piece in generation.steps():
            number = piece.number
            if number not in opened:
                opened[number] = self._logprobs(generation, number)
                num_values = self._num_logprobs(usage_of(self._call, 0, 0)) if self._call.echoes is not None else 0
                told = await off_loop(num_values, partial(opened[number].opening, echoes[number]))
                await self._send_events(send, self._opening(events, number, echoes[number], told))
            if piece.text or piece.entries:
                await self._send_events(send, (events.text(number, piece.text, opened[number].of(piece.entries)),))
            if piece.finish_reason is not None:
                await self._send_events(send, (events.finish(number, piece.finish_reason),))
        if self._call.wants_usage_chunk:
            usage = usage_of(self._call, generation.num_completion_tokens, generation.num_cached_tokens)
            await self._send_events(send, (events.usage(usage),))
        await self._send_events(send, (DONE,))
        await send({"type": "http.response.body", "body": b""})

    def _echoes(self) -> list[str]:
        """The text each choice starts with."""
        echoes = self._call.echoes or ("",) * len(self._call.prompts)
        return [echo for echo in echoes for _ in range(self._call.num_choices)]

    def _logprobs(self, generation: Generation, number: int) -> ChoiceLogprobs:
        of_prompt = generation.prompt_entries[number // self._call.num_candidates]
        return ChoiceLogprobs(self._engine.model.tokenizer, self._call, of_prompt)

    def _opening(
        self, events: ChunkEvents, number: int, echo: str, logprobs: dict[str, Any] | None = None
    ) -> list[bytes]:
        if self._call.is_chat:
            return [events.role(number)]
        return [events.text(number, echo, logprobs)] if echo or logprobs else []

    def _only_echo(self, events: ChunkEvents, echoes: list[str]) -> list[bytes]:
        finished = []
        for number, echo in enumerate(echoes):
            finished += [*self._opening(events, number, echo), events.finish(number, "length")]
        return finished

    async def _send_events(self, send: Send, events: Iterable[bytes]) -> None:
        """One write an event: some clients take a chunk of the transfer for an event."""
        if not self._has_started:
            self._has_started = True
            ignored = [(name.encode(), value.encode()) for name, value in ignored_header(self._call.ignored).items()]
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS + ignored})
        send_part = self._send_part or send
        for event in events:
            await send_part({"type": "http.response.body", "body": event, "more_body": True})

    async def _fail(self, error: Exception, send: Send) -> None:
        """Before the response has started the error gets its status; after, a stream gets an error event and ends."""
        if not self._has_started or not self._call.is_stream:
            raise error
        failure = as_http_error(error)
        await send({"type": "http.response.body", "body": error_event(failure.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        if failure.status == 500:
            LOGGER.error("a stream ended with an error", exc_info=error)


def ignored_header(names: tuple[str, ...]) -> dict[str, str]:
    """x-paceline-ignored, with names made safe for a header."""
    if not names:
        return {}
    shown = [quote(name[:64], safe="._-") for name in names[:MAX_IGNORED_SHOWN]]
    return {"x-paceline-ignored": ", ".join(shown) + (", ..." if len(names) > MAX_IGNORED_SHOWN else "")}


def phase_headers(generation: Generation) -> dict[str, str]:
    """x-paceline-queue-seconds and its like: known when all has ended, so a stream cannot carry them."""
    return {"x-paceline-" + name.replace("_", "-"): str(value) for name, value in phases_of(generation).items()}


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(work: asyncio.Future[None]) -> None:
    """Cancels work and waits until it has let go. What it raised was dealt with, or nobody listens any more."""
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
    if not work.cancelled():
        work.exception()             # marks it as seen

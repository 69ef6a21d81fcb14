"""The running choices of one call: submits them, merges their news, turns tokens into text, aborts what is left.

Knows no HTTP. `steps` yields (choice number, text, finish reason or None); what fails raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ..engine.detokenizer import OutputText, shown_token_ids
from ..engine.messages import RequestOutput, RequestTimeline
from ..model.tokenizer import Tokenizer
from ..request import FinishReason
from .engine_port import Engine, RequestStream
from .openai import Call
from .replies import HttpError

PUBLIC_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.TIMEOUT: "abort"}


class Choice:
    """The text of one choice as it grows."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._text = OutputText(tokenizer, stop)
        self.num_tokens = 0
        self.token_ids: list[int] = []                # generated so far, shown or not
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.end = FinishReason.ABORT.value           # how it ended, while it has not: by the client's leaving
        self.timeline: RequestTimeline | None = None

    def take(self, output: RequestOutput) -> str:
        """The text that became certain with this output."""
        self.num_tokens += len(output.token_ids)
        self.token_ids += output.token_ids
        self.num_cached_tokens = output.num_cached_tokens
        stop = output.stop
        text = self._text.push(shown_token_ids(output.token_ids, stop))
        if output.finish_reason is None:
            return text
        self.end, self.timeline = output.finish_reason.value, output.timeline
        self.finish_reason = PUBLIC_REASONS.get(output.finish_reason)
        if self.finish_reason is None:
            raise _failure(output.finish_reason)
        return text + self._text.finish(None if stop is None else stop.num_text_chars)


def _failure(reason: FinishReason) -> HttpError:
    if reason is FinishReason.ABORT:
        return HttpError(503, "the server ended this request before it was done", "aborted")
    return HttpError(500, "the step that computed this request failed", "generation_failed")


class Generation:
    """All choices of a call. If they cannot be submitted it raises Overloaded or EngineDead, leaving none behind."""

    def __init__(self, engine: Engine, call: Call) -> None:
        self._num_choices = call.num_choices
        self._streams: list[RequestStream] = []
        try:
            for submit in call.submits:
                self._streams.append(engine.submit(submit))
        except BaseException:
            self.abort()
            raise
        tokenizer = engine.model.tokenizer
        self.choices = [
            Choice(tokenizer, submit.sampling.stop) for submit in call.submits for _ in range(call.num_choices)
        ]

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts; choices of one prompt share them, so the first speaks for all."""
        return sum(choice.num_cached_tokens for choice in self.choices[:: self._num_choices])

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def abort(self) -> None:
        """Ends what still runs."""
        for stream in self._streams:
            stream.abort()

    async def steps(self) -> AsyncIterator[tuple[int, str, str | None]]:
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield self._take(0, output)
        else:
            async for prompt_index, output in merged(self._streams):
                yield self._take(prompt_index, output)
        if not self.is_finished:
            raise _failure(FinishReason.ABORT)    # a stream that was closed under us

    def _take(self, prompt_index: int, output: RequestOutput) -> tuple[int, str, str | None]:
        number = prompt_index * self._num_choices + output.choice_index
        choice = self.choices[number]
        if output.finish_reason is FinishReason.TIMEOUT and not self.num_completion_tokens:
            raise HttpError(504, "timeout: over before the first token came", "deadline_exceeded", "timeout")
        return number, choice.take(output), choice.finish_reason


async def merged(streams: list[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """News of several streams in order of arrival, with the stream's number; the first failure ends it."""
    news: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue()

    async def pump(index: int, stream: RequestStream) -> None:
        async for output in stream:
            news.put_nowait((index, output))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, stream in enumerate(streams):
                    group.create_task(pump(index, stream))
        finally:
            news.put_nowait(None)

    pumping = asyncio.ensure_future(pump_all())
    try:
        while (one := await news.get()) is not None:
            yield one
        await pumping
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        pumping.cancel()

"""The running choices of one call: submits them, merges their news, turns tokens into text, aborts what is left.

Knows no HTTP. `steps` yields Pieces; what fails raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ..engine.detokenizer import OutputText
from ..engine.messages import RequestOutput, RequestTimeline
from ..engine.sampling import best_choices
from ..model.tokenizer import Tokenizer
from ..request import FinishReason, SamplingParams
from .engine_port import Engine, RequestStream
from .logprobs import Entry
from .openai import Call
from .replies import HttpError

PUBLIC_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.TIMEOUT: "abort"}


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one choice: text that became certain, tokens with their log-probabilities where asked for, the end."""

    number: int
    text: str
    entries: tuple[Entry, ...]
    finish_reason: str | None


class Choice:
    """The text of one choice as it grows. drops_output: it is there for its prompt's log-probabilities alone."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, call: Call) -> None:
        self._text = OutputText.of(tokenizer, params)
        self._drops_output = call.is_echo_only
        self._has_entries = call.num_top_logprobs is not None
        self.num_tokens = 0
        self.token_ids: list[int] = []                # generated so far, shown or not
        self.num_cached_tokens = 0
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.end = FinishReason.ABORT.value           # how it ended, while it has not: by the client's leaving
        self.timeline: RequestTimeline | None = None

    def take(self, output: RequestOutput, number: int) -> Piece:
        """What this output brings."""
        self.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            self.end, self.timeline = output.finish_reason.value, output.timeline
            self.finish_reason = PUBLIC_REASONS.get(output.finish_reason)
            if self.finish_reason is None:
                raise _failure(output.finish_reason)
        if self._drops_output:
            self.finish_reason = self.finish_reason and "length"
            return Piece(number, "", (), self.finish_reason)
        self.num_tokens += len(output.token_ids)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        entries = _entries(output) if self._has_entries else ()
        if output.finish_reason is None:
            return Piece(number, self._text.push(output.token_ids), entries, None)
        return Piece(number, self._text.end(output.token_ids, output.stop), entries, self.finish_reason)


def _entries(output: RequestOutput) -> tuple[Entry, ...]:
    top = output.top_logprobs or ((),) * len(output.token_ids)
    return tuple(map(Entry, output.token_ids, output.logprobs or (), top))


def _failure(reason: FinishReason) -> HttpError:
    if reason is FinishReason.ABORT:
        return HttpError(503, "the server ended this request before it was done", "aborted")
    return HttpError(500, "the step that computed this request failed", "generation_failed")


class Generation:
    """All choices of a call. If they cannot be submitted it raises Overloaded or EngineDead, leaving none behind."""

    def __init__(self, engine: Engine, call: Call) -> None:
        self._call = call
        self._num_candidates = call.num_candidates
        self._streams: list[RequestStream] = []
        try:
            for submit in call.submits:
                self._streams.append(engine.submit(submit))
        except BaseException:
            self.abort()
            raise
        tokenizer = engine.model.tokenizer
        self.choices = [
            Choice(tokenizer, submit.sampling, call) for submit in call.submits for _ in range(call.num_candidates)
        ]
        # Log-probabilities of each prompt, complete before the first piece of its choices. The first token has none.
        self.prompt_entries = [[Entry(submit.prompt_token_ids[0], None)] for submit in call.submits]

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts; choices of one prompt share them, so the first speaks for all."""
        return sum(choice.num_cached_tokens for choice in self.choices[:: self._num_candidates])

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def answered(self) -> list[int]:
        """The numbers of the choices to answer with, in order; of best_of candidates, once all have finished."""
        numbers: list[int] = []
        for first in range(0, len(self.choices), self._num_candidates):
            logprobs = [choice.logprobs for choice in self.choices[first : first + self._num_candidates]]
            best: Sequence[int] = range(self._call.num_choices)
            if self._num_candidates > self._call.num_choices:
                best = best_choices(logprobs, self._call.num_choices)
            numbers += [first + choice for choice in best]
        return numbers

    def abort(self) -> None:
        """Ends what still runs."""
        for stream in self._streams:
            stream.abort()

    async def steps(self) -> AsyncIterator[Piece]:
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                if (piece := self._take(0, output)) is not None:
                    yield piece
        else:
            async for prompt_index, output in merged(self._streams):
                if (piece := self._take(prompt_index, output)) is not None:
                    yield piece
        if not self.is_finished:
            raise _failure(FinishReason.ABORT)    # a stream that was closed under us

    def _take(self, prompt_index: int, output: RequestOutput) -> Piece | None:
        if output.prompt_logprobs:
            self.prompt_entries[prompt_index] += [
                Entry(one.token_id, one.logprob, one.top) for one in output.prompt_logprobs]
        if not output.token_ids and output.finish_reason is None:
            return None                           # a part of a prompt, nothing to tell yet
        if output.finish_reason is FinishReason.TIMEOUT and not (output.token_ids or self.num_completion_tokens):
            raise HttpError(504, "timeout: over before the first token came", "deadline_exceeded", "timeout")
        number = prompt_index * self._num_candidates + output.choice_index
        return self.choices[number].take(output, number)


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

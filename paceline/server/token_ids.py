"""`return_token_ids`, as vLLM has it: the ids beside the text, in answers and in the events of streams.

Ids are all that were generated, those of a stop or an end of sequence included: they are what `usage` counts. An event
carries the ids that have come since the last one. The prompt's ids come once, with the first event of each choice:
completions carry them in the choice, chats beside `choices`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from .generation import Choice
from .openai import Call
from .sse import ChunkEvents


def add_to_answer(answer: dict[str, Any], call: Call, choices: Sequence[Choice]) -> None:
    """Completes the body of an answer in one piece."""
    if call.is_chat:
        answer["prompt_token_ids"] = call.prompts[0].token_ids
    for number, told in enumerate(answer["choices"]):
        told["token_ids"] = choices[number].token_ids if choices else []    # an echo alone generates nothing
        if not call.is_chat:
            told["prompt_token_ids"] = call.prompts[number // call.num_choices].token_ids


class EventsWithTokenIds(ChunkEvents):
    """The events of a stream, each with the ids that are due."""

    def __init__(self, call: Call, choices: Sequence[Choice]) -> None:
        super().__init__(call)
        self._call = call
        self._choices = choices
        self._num_sent = [0] * (len(call.prompts) * call.num_choices)
        self._has_begun = [False] * len(self._num_sent)

    def role(self, index: int) -> bytes:
        return self._with_ids(super().role(index), index, is_text=False)

    def text(self, index: int, text: str, logprobs: Mapping[str, Any] | None = None) -> bytes:
        return self._with_ids(super().text(index, text, logprobs), index)

    def finish(self, index: int, reason: str) -> bytes:
        return self._with_ids(super().finish(index, reason), index)

    def _with_ids(self, event: bytes, index: int, is_text: bool = True) -> bytes:
        ids = self._choices[index].token_ids[self._num_sent[index]:] if self._choices and is_text else []
        self._num_sent[index] += len(ids)
        inside, beside = b',"token_ids":' + orjson.dumps(ids), b""
        if not self._has_begun[index]:
            self._has_begun[index] = True
            prompt = self._call.prompts[index // self._call.num_choices]
            prompt_ids = b',"prompt_token_ids":' + orjson.dumps(prompt.token_ids)
            inside, beside = (inside, prompt_ids) if self._call.is_chat else (inside + prompt_ids, b"")
        head = event.removesuffix(self._tail).removesuffix(b"}]")
        return head + inside + b"}]" + beside + self._tail

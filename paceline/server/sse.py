"""Server-sent events of a stream. All that stays the same in a stream is encoded once; an event is a join of bytes.

Order per choice (OpenAI): chat starts with a chunk that has the role and content "", then text, then a chunk with an
empty delta and the finish reason. Completions send text, then empty text with the finish reason. The usage chunk, if
asked for, has no choices and comes last before [DONE]; all other chunks then have usage null. Log-probabilities come
with the step that made their tokens, the text of which may be held back until a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from .openai import Call

DONE = b"data: [DONE]\n\n"


class ChunkEvents:
    """Makes the events of one call."""

    def __init__(self, call: Call) -> None:
        head = {
            "id": call.call_id,
            "object": call.object_name,
            "created": call.created,
            "model": call.model_name,
            "system_fingerprint": call.fingerprint,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._tail = (b',"usage":null' if call.wants_usage_chunk else b"") + b"}\n\n"
        text_key = b',"delta":{"content":' if call.is_chat else b',"text":'
        closing = b"}" if call.is_chat else b""
        nothing = b',"delta":{}' if call.is_chat else b',"text":""'
        num_choices = len(call.prompts) * call.num_choices
        starts = [self._head + b',"choices":[{"index":%d' % index for index in range(num_choices)]
        self._before_text = [start + text_key for start in starts]
        self._after_text = closing + b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._before_logprobs = closing + b',"logprobs":'
        self._after_logprobs = b',"finish_reason":null}]' + self._tail
        self._before_reason = [start + nothing + b',"logprobs":null,"finish_reason":"' for start in starts]
        self._after_reason = b'"}]' + self._tail
        self._role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' + self._tail
        self._starts = starts

    def role(self, index: int) -> bytes:
        return self._starts[index] + self._role

    def text(self, index: int, text: str, logprobs: Mapping[str, Any] | None = None) -> bytes:
        start = self._before_text[index] + orjson.dumps(text)
        if logprobs is None:
            return start + self._after_text
        return start + self._before_logprobs + orjson.dumps(logprobs) + self._after_logprobs

    def finish(self, index: int, reason: str) -> bytes:
        return self._before_reason[index] + reason.encode() + self._after_reason

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        return self._head + b',"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"


def error_event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"

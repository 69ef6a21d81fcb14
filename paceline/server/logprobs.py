"""Log-probabilities in OpenAI's two shapes: of a completion, and of a chat.

Every token has an entry: an end token too, whose text is not shown, and so have the tokens of a stop string. A token's
text stands for itself, unless it is a part of a character: then it is `bytes:` and its bytes, as \\xf0\\x9f, and the
`bytes` of a chat's entries join to the text's. Values are raw, and at least -9999, since JSON has no infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.detokenizer import text_decoder
from ..model.tokenizer import Tokenizer
from ..sched.plan import TopLogprobs

if TYPE_CHECKING:
    from .openai import Call

LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A token, its log-probability (None: the prompt's first token has none) and the best tokens at its place."""

    token_id: int
    logprob: float | None
    top: TopLogprobs = ()


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    return _name_of(tokenizer.token_bytes(token_id))


def _name_of(spelling: bytes) -> str:
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class ChoiceLogprobs:
    """The log-probabilities of one choice, piece by piece, in its call's shape; None where it wants none."""

    def __init__(self, tokenizer: Tokenizer, call: Call, prompt_entries: Sequence[Entry]) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._prompt_entries = prompt_entries
        self._completion = CompletionLogprobs(tokenizer, call.skips_special_tokens)

    def opening(self, echo: str) -> dict[str, Any] | None:
        """Those of the prompt, where it is echoed."""
        if self._call.num_top_logprobs is None or self._call.echoes is None:
            return None
        told = self._completion.object_of(self._prompt_entries)
        self._completion.begin(len(echo))
        return told

    def of(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self._call.num_top_logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, entries) if self._call.is_chat else self._completion.object_of(entries)


class CompletionLogprobs:
    """tokens, token_logprobs, top_logprobs and text_offset; offsets run on from call to call."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self.begin(0)

    def begin(self, offset: int) -> None:
        """What comes now starts at this character of the whole text."""
        self._offset = offset
        self._decoder = text_decoder(self._tokenizer, self._skips)

    def object_of(self, entries: Sequence[Entry]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push(entry.token_id))
        return {
            "tokens": [token_name(self._tokenizer, entry.token_id) for entry in entries],
            "token_logprobs": [None if entry.logprob is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: Entry) -> dict[str, float] | None:
        """The best tokens, and the token itself where it is not among them. Of tokens with one text, the likelier keeps
        the text, the other goes by its id."""
        if entry.logprob is None:
            return None
        named: dict[str, float] = {}
        own = () if any(token_id == entry.token_id for token_id, _ in entry.top) else ((entry.token_id, entry.logprob),)
        for token_id, logprob in (*entry.top, *own):
            name = token_name(self._tokenizer, token_id)
            named[f"token_id:{token_id}" if name in named else name] = finite(logprob)
        return named


def joined(first: dict[str, Any] | None, rest: dict[str, Any] | None) -> dict[str, Any] | None:
    """A prompt's and its output's log-probabilities as one object."""
    if first is None or rest is None:
        return rest
    return {name: first[name] + rest[name] for name in rest}


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[Entry]) -> dict[str, Any]:
    """content: an entry a token, with exactly the best tokens that were asked for."""

    def told(token_id: int, logprob: float) -> dict[str, Any]:
        spelling = tokenizer.token_bytes(token_id)
        return {"token": _name_of(spelling), "logprob": finite(logprob), "bytes": list(spelling)}

    content = [{**told(entry.token_id, entry.logprob or 0.0), "top_logprobs": [told(*best) for best in entry.top]}
               for entry in entries]
    return {"content": content, "refusal": None}

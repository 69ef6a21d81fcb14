"""Plan -> SamplingExtras: what only some rows of a step ask for. A step without such rows never comes here.

Keeps, of the rows of the last plan, what stays the same from step to step (masks, biases) and the token history as an
array that grows by the tokens each step runs. All of it can be rebuilt from the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvariantError
from ..ops.interface import Ragged, SamplingExtras
from ..request import SamplingParams
from ..sched.plan import SamplingRef, ScheduledRequest, ScoredTokens, TokenHistory

Tokens = NDArray[np.int32]
NO_TOKENS: Tokens = np.zeros(0, np.int32)
NO_BIAS: NDArray[np.float32] = np.zeros(0, np.float32)
SMALLEST_PAST = 256    # tokens


class _Past:
    """A request's tokens as one array, the draws' past growing at its end."""

    def __init__(self, history: TokenHistory, num_before: int) -> None:
        tokens = (*history.prompt_token_ids, *history.output_token_ids)[:num_before]
        if len(tokens) < num_before:
            raise InvariantError(f"a history of {len(tokens)} tokens for a row at position {num_before}")
        self.prompt_token_ids = history.prompt_token_ids
        self.length = num_before
        self._tokens = np.zeros(max(2 * num_before, SMALLEST_PAST), np.int32)
        self._tokens[:num_before] = tokens

    def append(self, token_ids: Sequence[int]) -> None:
        end = self.length + len(token_ids)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self.length], np.zeros(end + self.length, np.int32)])
        self._tokens[self.length : end] = token_ids
        self.length = end

    def before(self, position: int) -> Tokens:
        return self._tokens[:position]


@dataclass(slots=True)
class _Known:
    """What is kept of a request from step to step."""

    request_id: str
    ref: SamplingRef
    allowed: Tokens
    biased: Tokens
    bias: NDArray[np.float32]
    past: _Past | None = None


@dataclass(slots=True)
class Entry:
    """What one wanted position asks for."""

    row: int
    params: SamplingParams | None    # None: scored
    num_top: int
    target: int = -1
    known: _Known | None = None
    history: Tokens | None = None    # only where a penalty reads it
    num_prompt: int = 0
    banned: Sequence[int] = ()


class ExtrasBuilder:
    """Makes the entries of a step's rows, and the arrays of all entries."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}    # of the rows of the last plan

    def drop_caches(self) -> None:
        self._known.clear()

    def scored(self, first_row: int, scored: ScoredTokens) -> list[Entry]:
        return [Entry(row, None, scored.num_top, target) for row, target in enumerate(scored.token_ids, first_row)]

    def drawn(self, first_row: int, row: ScheduledRequest, ref: SamplingRef, token_ids: Sequence[int]) -> list[Entry]:
        """token_ids: the row's own, resolved."""
        known = self._known_of(row, ref, token_ids)
        entries = []
        for index, offset in enumerate(row.logits_offsets, first_row):
            entry = Entry(index, ref.params, ref.params.logprobs or 0, known=known)
            if known.past is not None:
                _look_back(entry, ref, known.past, row.num_computed_tokens + offset + 1)
            entries.append(entry)
        return entries

    def build(self, entries: Sequence[Entry]) -> SamplingExtras | None:
        self._known = {entry.known.request_id: entry.known for entry in entries if entry.known is not None}
        return _arrays(entries) if entries else None

    def _known_of(self, row: ScheduledRequest, ref: SamplingRef, token_ids: Sequence[int]) -> _Known:
        known = self._known.get(row.request_id)
        if known is None or known.ref is not ref:
            params = ref.params
            known = _Known(row.request_id, ref, allowed=_tokens(params.allowed_token_ids or ()),
                           biased=_tokens([token_id for token_id, _ in params.logit_bias]),
                           bias=np.array([bias for _, bias in params.logit_bias], np.float32))
        if ref.looks_back:
            if row.history is None:
                raise InvariantError(f"{row.request_id} looks back, but its row has no history")
            past = known.past
            if (past is None or past.length != row.num_computed_tokens
                    or past.prompt_token_ids is not row.history.prompt_token_ids):
                past = known.past = _Past(row.history, row.num_computed_tokens)
            past.append(token_ids)
        return known


def _look_back(entry: Entry, ref: SamplingRef, past: _Past, position: int) -> None:
    params = ref.params
    num_prompt = min(len(past.prompt_token_ids), position)
    is_short = position - num_prompt < params.min_tokens
    output = past.before(position)[num_prompt:]
    entry.banned = [*(ref.end_token_ids if is_short else ()), *banned_words(params.bad_words, output)]
    if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        entry.history, entry.num_prompt = past.before(position), num_prompt


def banned_words(words: Sequence[tuple[int, ...]], output: Tokens) -> list[int]:
    """The tokens that would complete one of the words at the end of the output."""
    if not words:
        return []
    longest = max(map(len, words)) - 1
    tail = tuple(output[len(output) - min(longest, len(output)) :].tolist())
    return [word[-1] for word in words
            if len(word) == 1 or (len(word) - 1 <= len(tail) and tail[len(tail) - len(word) + 1 :] == word[:-1])]


def _tokens(token_ids: Sequence[int]) -> Tokens:
    return np.array(token_ids, np.int32) if token_ids else NO_TOKENS


def _ragged(lists: Sequence[Sequence[int] | Tokens]) -> Ragged:
    starts = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(one) for one in lists], out=starts[1:])
    return Ragged(starts, np.concatenate([np.asarray(one, np.int32) for one in lists]))


def _arrays(entries: Sequence[Entry]) -> SamplingExtras:
    def floats(name: str, neutral: float) -> NDArray[np.float32]:
        return np.array([neutral if e.params is None else getattr(e.params, name) for e in entries], np.float32)

    def ints(values: Any) -> Tokens:
        return np.array(list(values), np.int32)

    return SamplingExtras(
        rows=ints(e.row for e in entries),
        min_p=floats("min_p", 0.0), typical_p=floats("typical_p", 1.0),
        repetition_penalty=floats("repetition_penalty", 1.0), presence_penalty=floats("presence_penalty", 0.0),
        frequency_penalty=floats("frequency_penalty", 0.0),
        num_prompt=ints(e.num_prompt for e in entries), num_top=ints(e.num_top for e in entries),
        target=ints(e.target for e in entries),
        history=_ragged([NO_TOKENS if e.history is None else e.history for e in entries]),
        allowed=_ragged([NO_TOKENS if e.known is None else e.known.allowed for e in entries]),
        banned=_ragged([e.banned for e in entries]),
        biased=_ragged([NO_TOKENS if e.known is None else e.known.biased for e in entries]),
        bias=np.concatenate([NO_BIAS if e.known is None else e.known.bias for e in entries]),
    )

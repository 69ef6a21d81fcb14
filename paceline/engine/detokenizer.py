"""Generated token ids to text, piece by piece, and the search for stop strings.

One rule governs all text: whatever the split into pushes, the pieces of an OutputText join to
`tokenizer.decode(all output ids)`, the prompt never entering. So
- bytes of an unfinished character are held back; a limit inside a character ends the text, streamed or not, with the
  one U+FFFD that decode() gives;
- a prompt that ends inside a character leaves the output's first bytes without their head: U+FFFD as well;
- only the very first space of the output may be stripped (SentencePiece), never one at the start of a piece.

A stop string is found by the text alone: the first character that completes any stop string decides, of several the
longest; how tokens cut the text does not matter. A stop string that spells a special token is matched by that token's
id too, since the token is not part of the text. A character of the first min_tokens tokens decides nothing, though a
stop string may begin there. Stop strings are looked for in the whole text: no part of it is hidden from a client.
Work is constant per token and stop string.

StopFinder is the function handed to EngineCore; it runs between collect and update, so a stop is part of the result.
"""

from __future__ import annotations

import codecs
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ..model.tokenizer import Tokenizer
from ..request import SamplingParams, StopMatch
from ..sched.plan import RowResult, SchedulerOutput, StepResult


class TextDecoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelDecoder:
    """Concatenates the tokens' bytes; an incremental UTF-8 decoder keeps the unfinished tail (at most 3 bytes)."""

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped_ids = skipped_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped_ids else self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class _WindowDecoder:
    """Any other decoder: a token's text is what it adds after the last token before it, as decode() tells.

    A run of byte tokens (<0x..>) is decoded when it ends, because one bad byte turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._context: list[int] = []       # the last token that was decoded, if any
        self._context_text = ""
        self._run: list[int] = []           # byte tokens that wait for the run's end

    def push(self, token_id: int) -> str:
        text = self._tokenizer.inner.id_to_token(token_id)
        if token_id in self._skipped_ids or text is None:
            return ""
        if _BYTE_TOKEN.fullmatch(text):
            self._run.append(token_id)
            return ""
        delta = self._emit([*self._run, token_id])
        self._run = []
        self._context, self._context_text = [token_id], self._decode([token_id])
        return delta

    def finish(self) -> str:
        delta = self._emit(self._run)
        self._run = []
        return delta

    def _emit(self, token_ids: list[int]) -> str:
        return self._decode([*self._context, *token_ids])[len(self._context_text):] if token_ids else ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def text_decoder(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> TextDecoder:
    """Tokens to text one by one; a token's text may come with a later one, or with finish()."""
    skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    return (_ByteLevelDecoder if tokenizer.is_byte_level else _WindowDecoder)(tokenizer, skipped_ids)


class _StopSearch:
    """One stop string, searched with its failure table (Knuth, Morris, Pratt): a few operations a character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0                # characters of the stop string that the text now ends with
        self._fallback = _failure_table(stop)

    def is_completed_by(self, char: str) -> bool:
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._fallback[self.num_matched - 1]
        if self.stop[self.num_matched] == char:
            self.num_matched += 1
        return self.num_matched == len(self.stop)

    def go_on(self) -> None:
        """A match that does not count: the next one may begin inside it."""
        if self.num_matched == len(self.stop):
            self.num_matched = self._fallback[-1]


def _failure_table(stop: str) -> list[int]:
    """table[i]: length of the longest proper prefix of stop that stop[:i + 1] ends with."""
    table, matched = [0] * len(stop), 0
    for index in range(1, len(stop)):
        while matched and stop[index] != stop[matched]:
            matched = table[matched - 1]
        matched += stop[index] == stop[matched]
        table[index] = matched
    return table


class OutputText:
    """The text of one choice while it grows. `stop` holds non-empty strings.

    push() returns what may be sent: neither an unfinished character nor anything that may turn out to be part of a
    stop string. Once a stop string is found, pushes are void. A cut (StopMatch.num_text_chars) counts the text of an
    object with the same parameters.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), skip_special_tokens: bool = True,
                 min_tokens: int = 0, keeps_stop: bool = False) -> None:
        self._decoder = text_decoder(tokenizer, skip_special_tokens)
        self._num_unchecked = min_tokens
        self._keeps_stop = keeps_stop
        self._searches = [_StopSearch(text) for text in stop]
        self._stop_of_id = {tokenizer.added_ids[text]: text for text in stop if text in tokenizer.added_ids}
        if not skip_special_tokens:    # then they are text like any other
            self._stop_of_id.clear()
        self._is_plain = not self._searches and not self._stop_of_id    # nothing can end it: all text goes out at once
        self._unsent = ""
        self._num_chars = 0             # of the whole text so far, sent or not
        self._match: StopMatch | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams) -> OutputText:
        return cls(tokenizer, params.stop, params.skip_special_tokens, params.min_tokens,
                   params.include_stop_str_in_output)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text these tokens make safe to send."""
        if self._is_plain:
            text = "".join(map(self._decoder.push, token_ids))
            self._num_chars += len(text)
            return text
        for token_id in token_ids:
            if self._match is None:
                self._push_one(token_id)
        if self._match is not None:
            return self._release(self._match.num_text_chars or 0)
        return self._release(self._num_chars - max((search.num_matched for search in self._searches), default=0))

    def find_stop(self) -> StopMatch | None:
        """The stop string found so far, with the number of characters of text before it; None of them when it was a
        skipped special token, which cuts nothing."""
        return self._match

    def finish(self, num_text_chars: int | None = None) -> str:
        """The rest, up to num_text_chars characters of text in all; None: all of it, a found stop string included."""
        self._append(self._decoder.finish())
        return self._release(self._num_chars if num_text_chars is None else min(num_text_chars, self._num_chars))

    def end(self, token_ids: Sequence[int], stop: StopMatch | None) -> str:
        """The rest, with a finished choice's last tokens. What stopped it, a string or a token's text, is left out
        unless it is to be kept."""
        if stop is None:
            return self.push(token_ids) + self.finish()
        if stop.token_id is not None and not self._keeps_stop and token_ids and token_ids[-1] == stop.token_id:
            token_ids = token_ids[:-1]    # counted, but not shown
        cut = stop.num_text_chars
        if cut is not None and self._keeps_stop:
            cut += len(stop.text or "")
        return self.push(token_ids) + self.finish(cut)

    def _push_one(self, token_id: int) -> None:
        num_chars_before = self._num_chars
        is_checked = self._num_unchecked <= 0
        self._num_unchecked -= 1
        delta = self._decoder.push(token_id)
        self._append(delta)
        for index, char in enumerate(delta, start=1):
            completed = [search.stop for search in self._searches if search.is_completed_by(char)]
            if completed and not is_checked:
                for search in self._searches:
                    search.go_on()
            elif completed:
                text = max(completed, key=len)
                self._match = StopMatch(text=text, num_text_chars=num_chars_before + index - len(text))
                return
        if is_checked and token_id in self._stop_of_id:
            self._match = StopMatch(text=self._stop_of_id[token_id])    # no part of the text: all of it remains

    def _append(self, text: str) -> None:
        self._unsent += text
        self._num_chars += len(text)

    def _release(self, end: int) -> str:
        """Sends the text up to character `end` of the whole."""
        num_released = max(end - (self._num_chars - len(self._unsent)), 0)
        released, self._unsent = self._unsent[:num_released], self._unsent[num_released:]
        return released


OutputHistory = Callable[[str], Sequence[int] | None]


def _no_history(request_id: str) -> Sequence[int]:
    return ()


class StopFinder:
    """Marks the rows of a step in which a stop string was completed: `(plan, result) -> result`.

    Rows whose sampling has stop strings get their token_ids (and logprobs) cut after the completing token, which
    counts, and `stop` set. Keeps one OutputText per request: a cache keyed by request id, fed from results, dropped by
    forget(). On a miss it is rebuilt from `history(request_id)`: the output tokens before this step (EngineCore's
    requests have them), or None for a request that has finished, whose row is left alone. Without a history nothing
    must be dropped while its request runs.

    A row of several tokens is searched in order and knows no end-of-sequence ids: an eos token before the last one
    left in the row wins over `stop`.
    """

    def __init__(self, tokenizer: Tokenizer, history: OutputHistory = _no_history) -> None:
        self.history = history
        self._tokenizer = tokenizer
        self._texts: dict[str, OutputText] = {}

    def __call__(self, plan: SchedulerOutput, result: StepResult) -> StepResult:
        searched = {row.request_id: row.sampling.params for row in plan.rows
                    if row.sampling is not None and row.sampling.params.stop}
        if not searched:
            return result
        rows = tuple(self._search(row, searched.get(row.request_id)) for row in result.rows)
        return dataclasses.replace(result, rows=rows)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops what is known of these requests; unknown ids are no error."""
        for request_id in request_ids:
            self._texts.pop(request_id, None)

    def _search(self, row: RowResult, params: SamplingParams | None) -> RowResult:
        text = self._text_of(row.request_id, params) if params is not None and row.token_ids else None
        if text is None:
            return row
        for index, token_id in enumerate(row.token_ids, start=1):
            text.push((token_id,))
            match = text.find_stop()
            if match is not None:
                return dataclasses.replace(row.first(index), stop=match)
        return row

    def _text_of(self, request_id: str, params: SamplingParams) -> OutputText | None:
        text = self._texts.get(request_id)
        if text is None:
            history = self.history(request_id)
            if history is None:
                return None
            text = self._texts[request_id] = OutputText.of(self._tokenizer, params)
            text.push(history)
        return text


def make_find_stops(tokenizer: Tokenizer, history: OutputHistory = _no_history) -> StopFinder:
    """The find_stops of EngineCore; call its forget() when requests finish."""
    return StopFinder(tokenizer, history)

"""Requests before their words: how long, built of which parts, in what order. The words come with the cell's salt.

A part is named by a key; equal keys become equal tokens within a cell and other tokens in every other cell. So a draft
says exactly which prompts share a beginning, and no cell finds prompts of another one in a server's prefix cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .records import Asked

Key: TypeAlias = tuple[str | int, ...]

# Common English words; with a space before it each is one token, or nearly always one, of the usual vocabularies.
WORDS = (
    "river stone window garden winter copper silver market valley engine letter morning forest bridge mirror castle "
    "village summer kitchen mountain island planet shadow bottle circle feather water paper color music family school "
    "number animal country father mother doctor teacher student nature science history energy machine metal glass wood "
    "fire earth wind cloud storm rain snow light dark night evening week month year spring autumn north south east "
    "west road street house door table chair floor wall roof field farm horse bird fish tree flower leaf grass root "
    "seed bread milk sugar salt fruit apple orange lemon butter cheese meat soup coffee wine plate knife spoon cup box "
    "bag book page story poem word line song dance game ball team player coach match goal score race track speed power"
).split()


@dataclass(frozen=True, slots=True)
class Part:
    """So many tokens of a prompt, known by a key. `role` is who says them in a chat."""

    key: Key
    num_tokens: int
    role: str = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One request to come. As in Asked, but the prompt is its parts; `after` are places in the list of drafts."""

    parts: tuple[Part, ...]
    num_output_tokens: int
    arrival_seconds: float | None = None
    after: tuple[int, ...] = ()
    think_seconds: float = 0.0
    tenant: str | None = None
    slo: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


class TokenWriter:
    """Prompts as token ids, drawn evenly from a range that holds ordinary tokens in any vocabulary."""

    def __init__(self, salt: str, first_id: int, end_id: int) -> None:
        self._salt = salt
        self._ids = tuple(range(first_id, end_id))    # one object an id: prompts of millions of tokens stay small

    def fields(self, parts: Sequence[Part]) -> dict[str, Any]:
        return {"prompt_token_ids": tuple(self._ids[i] for part in parts for i in _draw(self._salt, part, self._ids))}


class WordWriter:
    """Prompts as text, a word for each token asked for; the server's count is reported beside."""

    def __init__(self, salt: str) -> None:
        self._salt = salt

    def text(self, parts: Sequence[Part]) -> str:
        return " ".join(WORDS[i] for part in parts for i in _draw(self._salt, part, WORDS))

    def fields(self, parts: Sequence[Part]) -> dict[str, Any]:
        return {"prompt": self.text(parts)}


class MessageWriter(WordWriter):
    """Prompts as chat messages: neighbours of one role are one message."""

    def fields(self, parts: Sequence[Part]) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for part in parts:
            if messages and messages[-1]["role"] == part.role:
                messages[-1]["content"] += " " + self.text([part])
            else:
                messages.append({"role": part.role, "content": self.text([part])})
        return {"messages": tuple(messages)}


Writer: TypeAlias = TokenWriter | WordWriter
WRITERS: dict[str, Callable[[str, int, int], Writer]] = {
    "ids": TokenWriter,
    "text": lambda salt, first_id, end_id: WordWriter(salt),
    "messages": lambda salt, first_id, end_id: MessageWriter(salt),
}


def _draw(salt: str, part: Part, table: Sequence[Any]) -> list[int]:
    """Places in the table, a function of salt and key alone; a longer part begins like a shorter one."""
    seed = hashlib.blake2b(repr((salt, part.key)).encode(), digest_size=16).digest()
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(seed, "little")))
    places: list[int] = rng.integers(0, len(table), part.num_tokens).tolist()
    return places


def write(drafts: Sequence[Draft], writer: Writer, name: str) -> list[Asked]:
    """The requests of one cell."""
    ids = [f"{name}-{number:05d}" for number in range(len(drafts))]
    return [
        Asked(request_id=ids[number], num_output_tokens=draft.num_output_tokens,
              num_prompt_tokens=draft.num_prompt_tokens, arrival_seconds=draft.arrival_seconds,
              after=tuple(ids[place] for place in draft.after), think_seconds=draft.think_seconds, tenant=draft.tenant,
              slo=draft.slo, **writer.fields(draft.parts))
        for number, draft in enumerate(drafts)]

"""The journal: everything that went into the scheduler and everything it decided, a JSON line each, for replay.

A listener of the engine's events. It alters nothing, and the step loop never waits for the disk: lines go to a thread
that writes them (journal_file.py). What fails, a full disk first of all, ends the journal with one notice and nothing
else.

Which tokens a request has matters to the schedule in two ways only: which full blocks are equal (prefix hits), and when
a request ends. So a journal holds no token: a chain of block hashes stands for a prompt, and how many tokens a row gave
and whether that ended the request for what was generated. A hash covers the cache extras and all tokens up to its
block's end, keyed with a random key that is never written: equal prefixes of one journal have equal hashes, and nobody
can test a guess of a prompt against them. Replay makes up tokens that give equal chains exactly where these are equal.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from typing import Any, Protocol

import orjson

from ..config import SchedulerConfig
from ..errors import RequestError
from ..sched.choices import choice_id
from ..sched.outputs import EngineStats, RequestOutput
from ..sched.plan import SchedulerOutput
from ..sched.setup import SchedulerSetup
from .events import StepRecord
from .journal_file import JournalDropped
from .journal_lines import Line, PlanEncoder, ends, request_fields, result_fields, row_entry, stats_fields
from .messages import Submit

FORMAT_VERSION = 1
SHOWN_HASH_BYTES = 8


class Sink(Protocol):
    def put(self, line: bytes) -> None:
        """Takes a line, newline included. Raises JournalDropped once writing has failed."""
        ...

    def close(self) -> str | None:
        """Writes what is left. What went wrong, where nobody has been told yet."""
        ...


class Chain:
    """The keyed hashes of a request's full blocks, as its tokens become known."""

    __slots__ = ("_block_size", "_digest", "_key", "_tail")

    def __init__(self, key: bytes, block_size: int, extras: Iterable[str]) -> None:
        self._key, self._block_size, self._tail = key, block_size, list[int]()
        parts = [extra.encode("utf-8", "surrogatepass") for extra in extras]
        self._digest = self._hash(b"".join(struct.pack("<I", len(part)) + part for part in parts))

    def copy(self) -> Chain:
        other = Chain(self._key, self._block_size, ())
        other._digest, other._tail = self._digest, self._tail.copy()
        return other

    def extend(self, token_ids: tuple[int, ...]) -> list[str]:
        """Hashes, in hex, of the blocks that these tokens complete."""
        self._tail += token_ids
        found: list[str] = []
        while len(self._tail) >= self._block_size:
            block, self._tail = self._tail[: self._block_size], self._tail[self._block_size :]
            self._digest = self._hash(self._digest + struct.pack(f"<{len(block)}q", *block))
            found.append(self._digest[:SHOWN_HASH_BYTES].hex())
        return found

    def _hash(self, content: bytes) -> bytes:
        return blake2b(content, key=self._key, digest_size=16).digest()


class Journal:
    """Recorder of one engine, and listener for the ends of requests. key: random bytes, kept in memory only."""

    def __init__(self, sink: Sink, setup: SchedulerSetup, key: bytes, has_tokens: bool = False,
                 about: dict[str, Any] | None = None) -> None:
        self._sink = sink
        self._key = key
        self._block_size = setup.block_size
        self._has_tokens = has_tokens
        self._plans = PlanEncoder()
        self._chains: dict[str, Chain] = {}          # of unfinished choices
        self._stats: EngineStats | None = None       # as last written
        self._in_flight: tuple[SchedulerOutput, float] | None = None
        self._put({"event": "header", "version": FORMAT_VERSION, "has_tokens": has_tokens, "setup": setup_fields(setup),
                   **(about or {})})

    def close(self) -> str | None:
        """Writes what is left, and says what went wrong with it where nobody has been told yet.

        A plan that never landed is the step on which the engine died.
        """
        if self._in_flight is not None:
            plan, now = self._in_flight
            with suppress(JournalDropped):    # told below, or before
                self._put({"event": "lost", "at": now, "plan": self._plans.encode(plan)})
        return self._sink.close()

    def on_added(self, submit: Submit, now: float) -> None:
        chain = self._chain(submit)
        line = {"event": "add", "at": now, "request": self._request(submit, chain)}
        for index in range(submit.num_choices):
            self._chains[choice_id(submit.request_id, index)] = chain.copy() if index else chain
        self._put_input(line)

    def on_refused(self, submit: Submit, now: float, error: RequestError) -> None:
        self._put_input({"event": "refuse", "at": now, "request": self._request(submit, self._chain(submit)),
                         "param": error.param, "reason": str(error)})

    def on_forked(self, parent_id: str, child: Submit, now: float) -> None:
        chain = self._chains[child.request_id] = self._chain(child)
        self._put_input({"event": "fork", "at": now, "parent_id": parent_id, "request": self._request(child, chain)})

    def on_aborted(self, request_ids: tuple[str, ...], now: float, outputs: tuple[RequestOutput, ...]) -> None:
        self._put_input({"event": "abort", "at": now, "request_ids": request_ids, "ended": ends(outputs)})
        self._forget(outputs)

    def on_expired(self, now: float, outputs: tuple[RequestOutput, ...]) -> None:
        self._put_input({"event": "expire", "at": now, "ended": ends(outputs)})
        self._forget(outputs)

    def on_switched(self, config: SchedulerConfig, now: float) -> None:
        self._put_input({"event": "switch", "at": now, "scheduler": asdict(config)})

    def on_planned(self, plan: SchedulerOutput, now: float) -> None:
        self._in_flight = (plan, now)    # told with its result: a line a step

    def on_landed(self, step: StepRecord) -> None:
        self._in_flight = None
        self._put({
            "event": "step", "at": step.planned_at, "until": step.updated_at, "plan": self._plans.encode(step.plan),
            "result": result_fields(step.result) | {"rows": self._row_entries(step)}, "ended": ends(step.outputs),
            "stats": stats_fields(step.stats, self._stats)})
        self._stats = step.stats
        self._forget(step.outputs)

    def _row_entries(self, step: StepRecord) -> list[int | Line]:
        outputs = {output.request_id: output for output in step.outputs}
        entries: list[int | Line] = []
        for result in step.result.rows:
            output = outputs.get(result.request_id)
            chain = self._chains.get(result.request_id)
            hashes = () if output is None or chain is None else chain.extend(output.token_ids)
            entries.append(row_entry(result, output, hashes, self._has_tokens))
        return entries

    def _chain(self, submit: Submit) -> Chain:
        return Chain(self._key, self._block_size, submit.cache_extras)

    def _request(self, submit: Submit, chain: Chain) -> Line:
        line = request_fields(submit, chain.extend(submit.prompt_token_ids), self._hidden)
        return line | ({"prompt_token_ids": submit.prompt_token_ids} if self._has_tokens else {})

    def _hidden(self, text: str) -> str:
        return blake2b(text.encode("utf-8", "surrogatepass"), key=self._key, digest_size=SHOWN_HASH_BYTES).hexdigest()

    def _forget(self, outputs: tuple[RequestOutput, ...]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._chains.pop(output.request_id, None)

    def _put_input(self, line: Line) -> None:
        """One that comes while a step runs belongs between its plan and its result, though its line comes first."""
        if self._in_flight is not None:
            line["during_step"] = self._in_flight[0].step_id
        self._put(line)

    def _put(self, line: Line) -> None:
        self._sink.put(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def setup_fields(setup: SchedulerSetup) -> Line:
    return asdict(setup) | {"eos_token_ids": sorted(setup.eos_token_ids)}


def setup_of(line: Line) -> SchedulerSetup:
    """Raises TypeError where the line holds knobs that this version does not know, ConfigError for values."""
    return SchedulerSetup(**line | {
        "scheduler": scheduler_config_of(line["scheduler"]), "windows": tuple(line["windows"]),
        "eos_token_ids": frozenset(line["eos_token_ids"])})


def scheduler_config_of(line: Line) -> SchedulerConfig:
    knobs: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
    return SchedulerConfig(**knobs)

"""What charts over time show, out of a journal: who held which slot, what the KV memory held, who waited.

Slots are ours: a request takes the lowest free one with its first row and leaves it when it ends or yields, as in a
server that has slots. Memory is looked at after NUM_SAMPLES of the steps or up to twice as many; the rest is exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine.journal_file import at_line
from ..engine.journal_lines import Line, rows_of
from ..engine.replay import Journaled
from ..kv.groups import NULL_BLOCK
from .timeline_charts import Span

NUM_SAMPLES = 200
PROMISING = "reserve"    # the admission that counts on blocks up to max_tokens without taking them
KV_DEFINITIONS = {
    "tokens": "tokens whose keys and values are held for running requests",
    "empty": "room for tokens in blocks that requests hold and have not filled",
    "promised": "room that admission keeps free for running requests to grow up to max_tokens (admission 'reserve')",
    "cached": "blocks that nobody holds and that still keep a prefix; they are given out when needed",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """A moment: seconds from the origin, requests, and shares of the KV memory by KV_DEFINITIONS."""

    at: float
    running: int
    waiting: int
    kv: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JournalView:
    """One cell over time. Seconds from the first measured request on."""

    spans: tuple[Span, ...]
    num_slots: int                 # of the strip: slots that were used
    max_num_seqs: int
    queue: tuple[Sample, ...]      # after every step
    memory: tuple[Sample, ...]     # after some steps, evenly
    preempted_at: tuple[float, ...]
    counts: Mapping[str, Any]


@dataclass(slots=True)
class _Request:
    order: int
    num_prompt_tokens: int
    max_tokens: int
    num_valid_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)


class _Slots:
    """Who is where, and the spans so far."""

    def __init__(self) -> None:
        self.spans: list[list[Any]] = []    # slot, start, end, kind, request id: grown in place
        self.num_used = 0
        self._free: list[int] = []
        self._slot_of: dict[str, int] = {}
        self._last: dict[str, list[Any]] = {}

    def step(self, kinds: Mapping[str, str], start: float, end: float) -> None:
        for request_id in [one for one in self._slot_of if one not in kinds]:
            heapq.heappush(self._free, self._slot_of.pop(request_id))
            self._last.pop(request_id)
        for request_id, kind in kinds.items():
            slot = self._slot(request_id)
            last = self._last.get(request_id)
            if last is not None and last[3] == kind:
                last[2] = end
            else:
                self._last[request_id] = span = [slot, start if last is None else last[2], end, kind, request_id]
                self.spans.append(span)

    def _slot(self, request_id: str) -> int:
        if request_id not in self._slot_of:
            if not self._free:
                heapq.heappush(self._free, self.num_used)
                self.num_used += 1
            self._slot_of[request_id] = heapq.heappop(self._free)
        return self._slot_of[request_id]


class JournalReader:
    """One pass over a journal. is_warm_up: by request id; time starts with the first that is not."""

    def __init__(self, journaled: Journaled, warm_up_ids: Iterable[str] = ()) -> None:
        self._setup = journaled.setup
        self._warm_up = set(warm_up_ids)
        self._slots = _Slots()
        self._requests: dict[str, _Request] = {}
        self._started: dict[str, None] = {}
        self._queue: list[tuple[float, int, int]] = []
        self._memory: list[Sample] = []
        self._preempted_at: list[float] = []
        self._stats: dict[str, Any] = {}
        self._before: dict[str, Any] = {}       # counters when the first measured request came
        self._origin: float | None = None
        self._num_refused = 0
        self._stride, self._num_steps = 1, 0    # every so many steps memory is looked at
        for number, line in journaled.lines:
            with at_line(journaled.path, number):
                self._take(line)

    def view(self) -> JournalView:
        orders = {request_id: one.order for request_id, one in self._requests.items()}
        origin = self._origin or 0.0
        spans = tuple(Span(slot, start - origin, end - origin, kind, orders.get(request_id, 0))
                      for slot, start, end, kind, request_id in self._slots.spans)
        return JournalView(
            spans=spans, num_slots=self._slots.num_used, max_num_seqs=self._setup.scheduler.max_num_seqs,
            queue=tuple(Sample(at - origin, running, waiting) for at, running, waiting in self._queue),
            memory=tuple(Sample(one.at - origin, one.running, one.waiting, one.kv) for one in self._memory),
            preempted_at=tuple(at - origin for at in self._preempted_at), counts=self._counts())

    def _counts(self) -> dict[str, Any]:
        grown = {name: self._stats[name] - self._before.get(name, 0) for name in (
            "num_preemptions", "num_steps", "num_recomputed_tokens", "num_slot_steps", "num_idle_slot_steps",
            "num_padding_rows", "prefix_cache_queries", "prefix_cache_hits") if name in self._stats}
        means = {name: sum(one.kv[name] for one in self._memory) / len(self._memory) for name in KV_DEFINITIONS
                 } if self._memory else {}
        return grown | {"kv_means": means, "steps_refused": self._num_refused,
                        "kv_tokens": self._setup.num_blocks * self._setup.block_size,
                        "block_size": self._setup.block_size}

    def _take(self, line: Line) -> None:
        match line["event"]:
            case "add" | "fork":
                self._add(line["request"], line["at"])
            case "step":
                self._step(line)
        for end in line.get("ended", ()):
            self._started.pop(end["request_id"], None)
        if line["event"] == "step" and self._origin is not None:
            self._look(line["until"])

    def _add(self, request: Line, at: float) -> None:
        request_id = request["request_id"]
        # The load numbers its requests as it sends them: ID-NUMBER.
        if self._origin is None and not {request_id, request_id.rpartition("-")[0]} & self._warm_up:
            self._origin, self._before = at, dict(self._stats)
            self._slots = _Slots()
        self._requests[request_id] = _Request(len(self._requests), request["num_prompt_tokens"],
                                              request["sampling"].get("max_tokens", 16))

    def _step(self, line: Line) -> None:
        plan, rows, padding = line["plan"], rows_of(line["plan"]), line["plan"].get("padding", {})
        self._stats |= line["stats"]
        self._num_refused += self._origin is not None and "refusal" in plan
        for victim in plan.get("preempted", ()):
            self._started.pop(victim["request_id"], None)
            self._preempted_at += [] if self._origin is None else [line["at"]]
        kinds = dict.fromkeys(self._started, "held") | dict.fromkeys(padding.get("request_id", ()), "padding")
        for index, request_id in enumerate(rows["request_id"]):
            one = self._requests.get(request_id)
            if one is None:    # a choice of a request with several
                continue
            self._started[request_id] = None
            one.num_valid_tokens = rows["num_computed_tokens"][index] + rows["num_tokens"][index]
            if (tables := rows["block_ids"][index]) is not None:
                one.tables = tables
            is_decode = rows["num_tokens"][index] == 1 and one.num_valid_tokens > one.num_prompt_tokens
            kinds[request_id] = "decode" if is_decode else "prefill"
        self._slots.step(kinds, line["at"], line["until"])

    def _look(self, at: float) -> None:
        running, waiting = self._stats.get("num_running", 0), self._stats.get("num_waiting", 0)
        self._queue.append((at, running, waiting))
        self._num_steps += 1
        if self._num_steps % self._stride == 0:
            self._memory.append(Sample(at, running, waiting, self._shares()))
        if len(self._memory) == 2 * NUM_SAMPLES:    # the journal turns out to be long: half as often, from its start
            self._memory, self._stride = self._memory[1::2], 2 * self._stride

    def _shares(self) -> dict[str, float]:
        """Of all blocks: held tokens, empty room in held blocks, promised blocks, cached blocks."""
        size, num_blocks = self._setup.block_size, self._setup.num_blocks
        filled: dict[int, int] = {}
        num_promised = 0
        for request_id in self._started:
            one = self._requests[request_id]
            num_held = 0
            for table in one.tables:
                for index, block_id in enumerate(table):
                    if block_id != NULL_BLOCK:
                        num_held += 1
                        tokens = min(max(one.num_valid_tokens - index * size, 0), size)
                        filled[block_id] = max(filled.get(block_id, 0), tokens)
            if self._setup.scheduler.admission == PROMISING:
                wanted = min(one.num_prompt_tokens + one.max_tokens, self._setup.max_model_len)
                num_promised += max(-(-wanted // size) * max(len(one.tables), 1) - num_held, 0)
        num_held = num_blocks - self._stats.get("num_free_blocks", num_blocks)
        num_cached = self._stats.get("num_cached_blocks", 0)
        tokens = sum(filled.values())
        return {"tokens": tokens / (num_blocks * size),
                "empty": max(num_held * size - tokens, 0) / (num_blocks * size),
                "promised": min(num_promised, num_blocks - num_held) / num_blocks,
                "cached": min(num_cached, max(num_blocks - num_held - num_promised, 0)) / num_blocks}

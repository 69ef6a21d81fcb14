"""Feeds a journal's arrivals and results back through a scheduler, and proves that it decides the same.

The journal holds no tokens; stand-ins are made up. The last token of a full block is a number made of the block's hash,
all others are one filler: two requests have equal blocks here exactly where they had them there. Stand-ins are
negative, so none is an end-of-sequence or stop token; that a request stopped is told to the scheduler by the journal,
as a stop string would be. Times are the recorded ones. So the scheduler is handed everything it was handed before, but
for what its decisions do not depend on, and must answer with the same plans, ends and counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, TypeAlias

import orjson

from ..config import SchedulerConfig
from ..errors import ConfigError, RequestError
from ..request import StopMatch
from ..sched.choices import choice_id
from ..sched.outputs import EngineStats, RequestOutput
from ..sched.plan import RowResult, SchedulerOutput, StepResult
from ..sched.policies import Policies
from ..sched.scheduler import Scheduler
from ..sched.setup import SchedulerSetup
from .core import request_of
from .journal import FORMAT_VERSION, scheduler_config_of, setup_of
from .journal_file import JournalError, at_line, read_journal
from .journal_lines import Line, PlanEncoder, ends, fixed, rows_of, stats_fields, submit_of
from .messages import Submit

FILLER = -1
MakeScheduler: TypeAlias = Callable[[SchedulerSetup], Scheduler]
MakePolicies: TypeAlias = Callable[[SchedulerConfig], Policies]


@dataclass(frozen=True, slots=True)
class LinesAfterHeader:
    """Numbered lines of a journal file, read anew for each pass: a journal may be larger than memory."""

    path: str

    def __iter__(self) -> Iterator[tuple[int, Line]]:
        return islice(read_journal(self.path), 1, None)


@dataclass(frozen=True, slots=True)
class Journaled:
    """A journal as read: how its scheduler was made, and its lines with their numbers in the file."""

    path: str
    header: Line
    setup: SchedulerSetup
    lines: Iterable[tuple[int, Line]]

    @classmethod
    def read(cls, path: str) -> Journaled:
        """Raises JournalError for a damaged file, ConfigError for one that cannot be opened."""
        _, header = next(read_journal(path))
        if header.get("version") != FORMAT_VERSION:
            raise JournalError(f"{path}, line 1: format {header.get('version')!r}; this version reads {FORMAT_VERSION}")
        try:
            return cls(path, header, setup_of(header["setup"]), LinesAfterHeader(path))
        except (ConfigError, KeyError, TypeError) as error:
            raise JournalError(f"{path}, line 1: not a header of this version: {error}") from error


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay first departs. `field` is a path into the line, such as plan.rows.num_tokens[3]."""

    line: int
    step: int | None
    field: str
    recorded: Any
    replayed: Any
    request_id: str | None = None    # whose row it is

    def __str__(self) -> str:
        row = "" if self.request_id is None else f" ({self.request_id})"
        step = "between steps" if self.step is None else f"step {self.step}"
        return (f"line {self.line}, {step}: {self.field}{row}: recorded {_shown(self.recorded)}, "
                f"replayed {_shown(self.replayed)}")


@dataclass
class Replayed:
    """What a replay saw. `difference` None: every plan, end and counter was the same."""

    num_steps: int = 0
    num_requests: int = 0
    difference: Difference | None = None
    finished: list[RequestOutput] = field(default_factory=list)


class StandIns:
    """Made-up tokens of requests, and how many each has."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_tokens: dict[str, int] = {}

    def prompt(self, request: Line) -> tuple[int, ...]:
        token_ids = self._tokens(0, request["num_prompt_tokens"], request["block_hashes"])
        for index in range(request.get("num_choices", 1)):
            self._num_tokens[choice_id(request["request_id"], index)] = len(token_ids)
        return token_ids

    def generated(self, request_id: str, num_tokens: int, block_hashes: Iterable[str]) -> tuple[int, ...]:
        start = self._num_tokens[request_id]
        self._num_tokens[request_id] = start + num_tokens
        return self._tokens(start, num_tokens, block_hashes)

    def _tokens(self, start: int, num_tokens: int, block_hashes: Iterable[str]) -> tuple[int, ...]:
        token_ids = [FILLER] * num_tokens
        first_end = -start % self._block_size or self._block_size
        for end, block_hash in zip(range(first_end, num_tokens + 1, self._block_size), block_hashes, strict=True):
            token_ids[end - 1] = stand_in(block_hash)
        return tuple(token_ids)


def stand_in(block_hash: str) -> int:
    """A negative number, other than FILLER, for the last token of a block."""
    return FILLER - 1 - (int(block_hash, 16) >> 2)


class Replay:
    """One pass over a journal. `run` returns at the first difference."""

    def __init__(self, journaled: Journaled, make_scheduler: MakeScheduler, make_policies: MakePolicies) -> None:
        self._journaled = journaled
        self._scheduler = make_scheduler(journaled.setup)
        self._make_policies = make_policies
        self._stand_ins = StandIns(journaled.setup.block_size)
        self._plans = PlanEncoder()
        self._stats: EngineStats | None = None
        self._held: list[tuple[int, Line]] = []    # inputs that came while the next step ran
        self._seen = Replayed()
        self._inputs = {"add": self._add, "refuse": self._refuse, "fork": self._fork, "abort": self._abort,
                        "expire": self._expire, "switch": self._switch}

    def run(self) -> Replayed:
        for number, line in self._journaled.lines:
            with at_line(self._journaled.path, number):
                self._seen.difference = self._play(number, line)
            if self._seen.difference is not None:
                break
        return self._seen

    def _play(self, number: int, line: Line) -> Difference | None:
        if line["event"] == "step":
            return self._step(number, line)
        if line["event"] == "lost":
            return self._plan(number, line)[1]
        if "during_step" in line:
            self._held.append((number, line))
            return None
        return self._inputs[line["event"]](number, line)

    # --- inputs

    def _add(self, number: int, line: Line) -> Difference | None:
        self._seen.num_requests += 1
        try:
            self._scheduler.add(request_of(self._submit(line)))
        except RequestError as error:
            return Difference(number, None, "request", "accepted", f"refused: {error}", line["request"]["request_id"])
        return None

    def _refuse(self, number: int, line: Line) -> Difference | None:
        try:
            self._scheduler.add(request_of(self._submit(line)))
        except RequestError as error:
            return _difference(number, None, {"reason": line["reason"]}, {"reason": str(error)})
        return Difference(number, None, "request", f"refused: {line['reason']}", "accepted",
                          line["request"]["request_id"])

    def _fork(self, number: int, line: Line) -> Difference | None:
        child = request_of(self._submit(line))
        child.parent_id = line["parent_id"]
        self._scheduler.fork(line["parent_id"], child)
        return None

    def _abort(self, number: int, line: Line) -> Difference | None:
        outputs = self._scheduler.abort(tuple(line["request_ids"]), line["at"])
        self._seen.finished += outputs
        return _difference(number, None, {"ended": line["ended"]}, {"ended": ends(outputs)})

    def _expire(self, number: int, line: Line) -> Difference | None:
        outputs = self._scheduler.expire(line["at"])
        self._seen.finished += outputs
        return _difference(number, None, {"ended": line["ended"]}, {"ended": ends(outputs)})

    def _switch(self, number: int, line: Line) -> Difference | None:
        config = scheduler_config_of(line["scheduler"])
        self._scheduler.switch_policies(self._make_policies(config), config)
        return None

    def _submit(self, line: Line) -> Submit:
        return submit_of(line["request"], self._stand_ins.prompt(line["request"]))

    # --- steps

    def _step(self, number: int, line: Line) -> Difference | None:
        plan, difference = self._plan(number, line)
        for held_number, held in self._held:
            difference = difference or self._inputs[held["event"]](held_number, held)
        self._held.clear()
        if difference is not None:
            return difference
        result = self._result(plan, line["result"])
        outputs = self._scheduler.update(plan, result, line["until"])
        stats = self._scheduler.stats()
        self._seen.num_steps += 1
        self._seen.finished += [output for output in outputs if output.finish_reason is not None]
        replayed = {"ended": ends(outputs), "stats": stats_fields(stats, self._stats)}
        self._stats = stats
        return _difference(number, plan.step_id, {name: line[name] for name in replayed}, replayed)

    def _plan(self, number: int, line: Line) -> tuple[SchedulerOutput, Difference | None]:
        plan = self._scheduler.schedule(line["at"])
        encoded = self._plans.encode(plan)
        return plan, _difference(number, plan.step_id, {"plan": line["plan"]}, {"plan": encoded})

    def _result(self, plan: SchedulerOutput, recorded: Line) -> StepResult:
        rows = tuple(row_result(row.request_id, fixed(entry), self._stand_ins)
                     for row, entry in zip(plan.rows, recorded["rows"], strict=True))
        named = {name: value for name, value in recorded.items() if name not in ("rows", "transfers_done")}
        return StepResult(step_id=plan.step_id, rows=rows, transfers_done=tuple(recorded.get("transfers_done", ())),
                          **named)


def row_result(request_id: str, entry: Any, stand_ins: StandIns) -> RowResult:
    """A row's result with stand-ins for its tokens, and for what else it held so many of."""
    others: dict[str, Any] = {}
    for one in fields(RowResult):
        if one.name in entry and one.name != "token_ids":
            others[one.name] = entry[one.name]
        elif f"num_{one.name}" in entry:
            others[one.name] = (None,) * entry[f"num_{one.name}"]
    if entry["num_tokens"]:
        others["token_ids"] = stand_ins.generated(request_id, entry["num_tokens"], entry.get("block_hashes", ()))
    if entry.get("is_stopped"):
        others["stop"] = StopMatch()
    return RowResult(request_id, **others)


# --- what differs

def _difference(number: int, step: int | None, recorded: Line, replayed: Line) -> Difference | None:
    plain = orjson.loads(orjson.dumps(replayed))
    if plain == recorded:
        return None
    path, old, new = next(_leaves(recorded, plain, ()))
    return Difference(number, step, _path(path), old, new, _row_of(path, recorded))


def _leaves(old: Any, new: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any, Any]]:
    """Every place where two plain values differ, in the order of the recorded line."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _leaves(old.get(name), new.get(name), (*path, name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _leaves(*pair, (*path, index))
    elif old != new:
        yield path, old, new


def _path(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _row_of(path: tuple[str | int, ...], recorded: Line) -> str | None:
    match path:
        case ("plan", "rows", _, int(index), *_):
            ids: list[str] = rows_of(recorded["plan"])["request_id"]
            return ids[index] if index < len(ids) else None
    return None


def _shown(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 120 else f"{text[:117]}..."

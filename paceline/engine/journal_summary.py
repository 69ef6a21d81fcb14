"""What a journal tells a person: counts, waits, what preemption and refusals cost, and requests over steps, drawn."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from .journal_file import at_line
from .journal_lines import Line, rows_of
from .replay import Journaled

DEFINITIONS = {
    "queue_seconds": "arrival to the first step with a row of the request, of choices that ended after one",
    "ttft_seconds": "arrival to the end of the step that gave the first token",
    "e2e_seconds": "arrival to the end, of choices that ended by stop or length",
    "step_seconds": "a step's schedule to its update, on the engine's clock; executor_seconds is its kernels' share",
    "p50, p90, p99": "nearest rank: the smallest value that so many percent do not exceed",
    "hit_rate": "prompt tokens taken from the prefix cache at first admission, of those looked up",
    "lost_tokens": "computed tokens of victims, at the moment they yielded; recomputed_tokens ran again since",
    "switches": "policies switched on the running engine: before which step, and every knob that changed",
    "refusals": "steps in which the head of the queue did not start because of this limit; how many requests it met",
}
MAX_LANES = 40
WAITING, HELD, DECODE, PREFILL, PREEMPTED = range(1, 6)    # a cell shows the highest of its steps
UNICODE_MARKS, ASCII_MARKS = " ·-█▒×", " .-=#x"
COLOURS = {WAITING: "2", HELD: "33", DECODE: "32", PREFILL: "34", PREEMPTED: "31"}


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Nearest rank; None of nothing."""
    ordered = sorted(values)
    return ordered[max(ceil(percent / 100 * len(ordered)) - 1, 0)] if ordered else None


def spread(name: str, values: list[float]) -> dict[str, float | None]:
    return {f"{name}_p{percent}": percentile(values, percent) for percent in (50, 90, 99)} | {
        f"{name}_max": max(values, default=None)}


@dataclass
class Chart:
    """Requests over steps, in at most `width` columns: neighbours are merged as the journal grows."""

    width: int
    max_lanes: int = MAX_LANES
    num_steps: int = 0
    left_out: set[str] = field(default_factory=set)
    _steps_a_column: int = 1
    _lanes: dict[str, dict[int, int]] = field(default_factory=dict)
    _state: dict[str, int] = field(default_factory=dict)    # of those who are there: WAITING or HELD

    def arrives(self, request_id: str) -> None:
        if len(self._lanes) < self.max_lanes:
            self._lanes[request_id] = {}
            self._state[request_id] = WAITING
        else:
            self.left_out.add(request_id)

    def leaves(self, request_id: str) -> None:
        self._state.pop(request_id, None)

    def step(self, rows: Mapping[str, int], preempted: Iterable[str]) -> None:
        """rows: PREFILL or DECODE by request."""
        for request_id in rows:
            if request_id not in self._lanes and request_id not in self.left_out:    # a choice is born
                self.arrives(request_id)
        column = self.num_steps // self._steps_a_column
        if column == self.width:
            self._merge()
            column = self.num_steps // self._steps_a_column
        marks = dict(self._state) | {one: mark for one, mark in rows.items() if one in self._state}
        marks |= {one: PREEMPTED for one in preempted if one in self._state}
        for request_id, mark in marks.items():
            lane = self._lanes[request_id]
            lane[column] = max(lane.get(column, 0), mark)
            self._state[request_id] = {PREEMPTED: WAITING, WAITING: WAITING}.get(mark, HELD)
        self.num_steps += 1

    def _merge(self) -> None:
        self._steps_a_column *= 2
        for request_id, lane in self._lanes.items():
            merged: dict[int, int] = defaultdict(int)
            for column, mark in lane.items():
                merged[column // 2] = max(merged[column // 2], mark)
            self._lanes[request_id] = dict(merged)

    def text(self, *, is_unicode: bool, has_colours: bool) -> str:
        marks = UNICODE_MARKS if is_unicode else ASCII_MARKS
        names = {one: one if len(one) <= 20 else f"{one[:8]}..{one[-10:]}" for one in self._lanes}
        label = max(map(len, names.values()), default=0)
        num_columns = -(-self.num_steps // self._steps_a_column)
        lines = [f"steps 0 to {self.num_steps - 1}, {self._steps_a_column} a column: {marks[WAITING]} waits, "
                 f"{marks[PREFILL]} prefill, {marks[DECODE]} decode, {marks[HELD]} holds blocks without a row, "
                 f"{marks[PREEMPTED]} preempted"]
        for request_id, lane in self._lanes.items():
            cells = "".join(_cell(lane.get(column, 0), marks, has_colours) for column in range(num_columns))
            lines.append(f"{names[request_id]:>{label}} {cells}".rstrip())
        if self.left_out:
            lines.append(f"and {len(self.left_out)} choices that arrived later (--rows)")
        return "\n".join(lines)


def _cell(mark: int, marks: str, has_colours: bool) -> str:
    return f"\x1b[{COLOURS[mark]}m{marks[mark]}\x1b[0m" if has_colours and mark else marks[mark]


class Summary:
    """One pass over a journal."""

    def __init__(self, journaled: Journaled, chart: Chart) -> None:
        self.chart = chart
        self._journaled = journaled
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._num_prompt_tokens: dict[str, int] = {}
        self._timelines: list[Line] = []
        self._step_seconds: list[float] = []
        self._executor_seconds: list[float] = []
        self._knobs: Line = journaled.header["setup"]["scheduler"]
        self._switches: list[str] = []
        self._last_step_id = -1
        self._refusals: Counter[str] = Counter()    # steps by limit
        self._refused: dict[str, set[str]] = defaultdict(set)
        self._door: Counter[str] = Counter()
        self._victims: Counter[str] = Counter()
        self._stats: dict[str, Any] = {}
        self._started_at: float | None = None
        self._ended_at = 0.0
        for number, line in journaled.lines:
            with at_line(journaled.path, number):
                self._take(line)

    def facts(self) -> dict[str, dict[str, Any]]:
        header, stats = self._journaled.header, self._stats
        seconds = 0.0 if self._started_at is None else self._ended_at - self._started_at
        generated = stats.get("num_generation_tokens", 0)
        return {
            "journal": {
                "file": self._journaled.path, "model": header.get("model"), "written_by": header.get("paceline"),
                "system_fingerprint": header.get("fingerprint"), "started_at": header.get("started_at"),
                "seconds": seconds, "policy_switches": self._counts["switch"]},
            "requests": {
                "requests": self._counts["add"], "choices": self._counts["choices"],
                **{f"ended_by_{reason}": count for reason, count in sorted(self._reasons.items())},
                "unfinished": self._counts["choices"] - self._reasons.total(),
                "refused_at_the_door": self._counts["refuse"],
                **{f"refused_{reason}": count for reason, count in sorted(self._door.items())}},
            "tokens": {
                "prompt_tokens": self._counts["prompt_tokens"], "generated_tokens": generated,
                "generated_tokens_per_second": generated / seconds if seconds else None,
                "computed_prompt_tokens": stats.get("num_prompt_tokens_computed", 0),
                "recomputed_tokens": stats.get("num_recomputed_tokens", 0),
                "hit_tokens": stats.get("prefix_cache_hits", 0),
                "hit_rate": _share(stats.get("prefix_cache_hits", 0), stats.get("prefix_cache_queries", 0))},
            "steps": {
                "steps": self._counts["step"], "rows_a_step": _share(self._counts["rows"], self._counts["step"]),
                "tokens_a_step": _share(self._counts["row_tokens"], self._counts["step"]),
                **spread("step_seconds", self._step_seconds), **spread("executor_seconds", self._executor_seconds),
                **{name: value for name, value in stats.items() if "idle" in name}},
            "waits": {**spread("queue_seconds", self._times("first_scheduled_at")),
                      **spread("ttft_seconds", self._times("first_token_at")),
                      **spread("e2e_seconds", self._times("finished_at", ("stop", "length")))},
            "preemptions": {
                "preemptions": self._counts["preempted"], "lost_tokens": self._counts["lost_tokens"],
                "freed_blocks": self._counts["freed_blocks"], "requests_preempted": len(self._victims),
                "most_of_one_request": max(self._victims.values(), default=0)},
            "refusals": {
                limit: f"{num_steps} steps, {len(self._refused[limit])} requests"
                for limit, num_steps in self._refusals.most_common()},
            "switches": {f"switch_{number}": told for number, told in enumerate(self._switches, 1)},
            "definitions": dict(DEFINITIONS),
        }

    def _take(self, line: Line) -> None:
        self._counts[line["event"]] += 1
        self._started_at = line["at"] if self._started_at is None else self._started_at
        self._ended_at = line["until"] if "until" in line else line["at"]
        match line["event"]:
            case "add" | "fork":
                request = line["request"]
                self._counts["choices"] += request.get("num_choices", 1)
                self._counts["prompt_tokens"] += request["num_prompt_tokens"]
                self.chart.arrives(request["request_id"])
            case "refuse":
                self._door[line.get("param") or "other"] += 1
            case "switch":
                self._switch(line["scheduler"])
            case "step":
                self._step(line)
        for end in line.get("ended", ()):
            self._reasons[end["finish_reason"]] += 1
            self._timelines.append(end)
            self.chart.leaves(end["request_id"])

    def _switch(self, knobs: Line) -> None:
        changes = [f"{name} {self._knobs.get(name)} -> {value}" for name, value in knobs.items()
                   if value != self._knobs.get(name)]
        next_step = self._last_step_id + 1
        self._switches.append(f"before step {next_step}: {', '.join(changes) or 'nothing changed'}")
        self._knobs = knobs

    def _step(self, line: Line) -> None:
        plan, rows = line["plan"], rows_of(line["plan"])
        self._last_step_id = plan["step_id"]
        self._step_seconds.append(line["until"] - line["at"])
        self._executor_seconds.append(line["result"].get("duration_seconds", 0.0))
        self._counts["rows"] += len(rows["request_id"])
        self._counts["row_tokens"] += sum(rows["num_tokens"])
        for victim in plan.get("preempted", ()):
            self._counts["preempted"] += 1
            self._counts["lost_tokens"] += victim["num_lost_tokens"]
            self._counts["freed_blocks"] += victim["num_freed_blocks"]
            self._victims[victim["request_id"]] += 1
        if (refusal := plan.get("refusal")) is not None:
            self._refusals[refusal["limit"]] += 1
            self._refused[refusal["limit"]].add(refusal["request_id"])
        self._stats |= line["stats"]
        marks = {request_id: DECODE if num_tokens == 1 and offsets else PREFILL for request_id, num_tokens, offsets
                 in zip(rows["request_id"], rows["num_tokens"], rows["logits_offsets"], strict=True)}
        self.chart.step(marks, [victim["request_id"] for victim in plan.get("preempted", ())])

    def _times(self, moment: str, reasons: tuple[str, ...] | None = None) -> list[float]:
        """Seconds from arrival to that moment, of those who reached it."""
        return [end["timeline"][moment] - end["timeline"]["arrived_at"] for end in self._timelines
                if end["timeline"][moment] is not None and (reasons is None or end["finish_reason"] in reasons)]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None

"""A whole measurement of one target: cells one after another, in rounds, each with words of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigError
from .arrivals import Arrivals
from .load_generator import CellPlan, CellResult, Run, Watcher, run_cell
from .metrics import over_repeats, summarise
from .records import Asked
from .request_file import salted
from .slo import Slo, slo_of
from .targets import Target
from .workload import WorkloadSpec, draft, requests_of

WARM_UP_OF_AN_OPEN_LOOP = 4
MAX_PROBES = 24
MOST_HALVINGS = 10
RATE_DEFINITION = (
    "greatest arrival rate, found by bisection to {precision:.0%}, at which at least {attainment:.0%} of {count} "
    "requests kept their limits (a probe that can no more do so is stopped); with more requests a probe, a queue that "
    "grows slowly shows as well")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A row of the result."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    concurrency: int | None = None

    @property
    def name(self) -> str:
        kind = self.arrivals.kind
        if kind == "closed":
            return f"concurrency={self.concurrency}"
        cap = "" if self.concurrency is None else f",cap={self.concurrency}"
        return (f"rate={self.arrivals.rate:g}" if self.arrivals.rate is not None else kind) + cap


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What is measured. The requests are those of `requests`, else of the workload."""

    workload: WorkloadSpec
    requests: Sequence[Asked] | None = None
    is_salted: bool = True                   # requests of a file get a salt in front
    cells: Sequence[Cell]
    repeats: int = 1
    ramp_in_seconds: float | None = None
    warm_up: int | None = None               # requests before each cell; None: as many as run at once
    slos: Mapping[str | None, Slo] = field(default_factory=dict)
    beside: Sequence[str] = ()               # other tools in whose words the figures are told as well
    salt: str

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats must be at least 1, got {self.repeats}")
        if self.warm_up is not None and self.warm_up < 0:
            raise ConfigError(f"warm_up must be at least 0, got {self.warm_up}")
        asked = draft(self.workload) if self.requests is None else self.requests
        classes = {one.slo for one in asked if one.slo is not None}
        if unknown := [name for name in self.slos if name is not None and name not in classes]:
            raise ConfigError(f"slo: no request is of class {unknown[0]!r}; there are {sorted(classes) or 'none'}")

    def place(self, cell: Cell, number: int) -> str:
        """The name of a cell in a round."""
        return cell.name if self.repeats == 1 else f"{cell.name}/{number + 1}"

    def asked_in(self, place: str) -> list[Asked]:
        """The requests of one cell of one round."""
        salt = f"{self.salt}/{place}"
        if self.requests is None:
            return requests_of(self.workload, salt)
        spec = self.workload
        return (salted(self.requests, salt, spec.first_token_id, spec.end_token_id) if self.is_salted
                else list(self.requests))

    def cell_plan(self, cell: Cell, place: str) -> CellPlan:
        count = self.warm_up
        if count is None:
            count = cell.concurrency or WARM_UP_OF_AN_OPEN_LOOP
        return CellPlan(name=place, arrivals=cell.arrivals, concurrency=cell.concurrency, seed=self.workload.seed,
                        ramp_in_seconds=self.ramp_in_seconds, warm_up=self._warm_up(count, place))

    def _warm_up(self, count: int, place: str) -> list[Asked]:
        """Requests of the same shape with other words, as often as needed. None waits for another: as many as run at
        once are to be seen by the target at once."""
        found: list[Asked] = []
        while len(found) < count:
            number = len(found)
            more = self.asked_in(f"{place}/warm-up-{number}")[: count - number]
            found += [replace(asked, request_id=f"warm-up-{number}-{asked.request_id}", after=(), think_seconds=0.0)
                      for asked in more]
        return found


def in_words_of(result: CellResult, name: str) -> dict[str, Any]:
    """What another tool would tell of the same requests: latencies and throughput."""
    summary = summarise(result.records, result.facts(definitions=name))
    return {key: value for key, value in summary.items() if key.endswith("_seconds") or key == "throughput"}


@dataclass(kw_only=True)
class BenchResult:
    """What has been measured so far."""

    results: list[CellResult] = field(default_factory=list)
    summaries: dict[str, list[dict[str, Any]]] = field(default_factory=dict)    # by cell, one a round
    found_rate: dict[str, Any] | None = None
    is_interrupted: bool = False

    def about(self) -> dict[str, Any]:
        cells = [{"cell": name, "repeats": repeats, "over_repeats": over_repeats(repeats)}
                 for name, repeats in self.summaries.items()]
        return {"cells": cells, "found_rate": self.found_rate, "is_interrupted": self.is_interrupted}


OnCell = Callable[[CellResult, dict[str, Any]], None]


class Bench:
    """Runs a plan. `watch` sees each request end, `on_cell` each cell with its summary."""

    def __init__(self, target: Target, plan: BenchPlan, watch: Watcher | None = None,
                 on_cell: OnCell | None = None) -> None:
        self.result = BenchResult()
        self._target, self._plan, self._watch, self._on_cell = target, plan, watch, on_cell

    async def run(self) -> BenchResult:
        """All cells in each round, so that a machine that changes changes all of them."""
        for number in range(self._plan.repeats):
            for cell in self._plan.cells:
                await self._measure(cell, number)
                if self.result.is_interrupted:
                    return self.result
        return self.result

    async def find_rate(self, first: float, attainment: float, precision: float) -> BenchResult:
        """The greatest rate that the target sustains, from arrivals like those of the plan's one cell."""
        base = self._plan.cells[0]

        async def probe(rate: float) -> dict[str, Any] | None:
            cell = replace(base, arrivals=replace(base.arrivals, rate=rate))
            summary = await self._measure(cell, 0, attainment)
            return None if self.result.is_interrupted else summary

        found = await bisect(probe, first, attainment, precision)
        count = self._plan.workload.num_requests if self._plan.requests is None else len(self._plan.requests)
        found["definition"] = RATE_DEFINITION.format(precision=precision, attainment=attainment, count=count)
        self.result.found_rate = found
        return self.result

    def _watching(self, attainment: float | None) -> Watcher:
        """With an attainment to reach, a cell that can no more reach it is stopped: a queue beyond the target's means
        would only grow."""
        num_missed, num_seen = 0, 0

        def watch(run: Run) -> None:
            nonlocal num_missed, num_seen
            if self._watch is not None:
                self._watch(run)
            if attainment is None or run.is_stopped:
                return
            for record in run.records[num_seen:]:
                slo = slo_of(record, self._plan.slos)
                is_met = record.status == "ok" if slo is None else slo.is_met_by(record)
                num_missed += not (is_met or record.is_warm_up)
            num_seen = len(run.records)
            if num_missed > (1 - attainment) * run.num_requests:
                run.stop()

        return watch

    async def _measure(self, cell: Cell, number: int, attainment: float | None = None) -> dict[str, Any]:
        place = self._plan.place(cell, number)
        result = await run_cell(self._target, self._plan.asked_in(place), self._plan.cell_plan(cell, place),
                                self._watching(attainment))
        summary = summarise(result.records, result.facts(self._plan.slos))
        summary["in_words_of"] = {name: in_words_of(result, name) for name in self._plan.beside}
        summary |= {"round": number + 1, "is_interrupted": result.is_interrupted, "is_stopped": result.is_stopped,
                    "not_sent": result.num_not_sent}
        self.result.results.append(result)
        self.result.summaries.setdefault(cell.name, []).append(summary)
        self.result.is_interrupted = result.is_interrupted
        if self._on_cell is not None:
            self._on_cell(result, summary)
        return summary


Probe = Callable[[float], Awaitable[dict[str, Any] | None]]


async def bisect(probe: Probe, first: float, attainment: float, precision: float) -> dict[str, Any]:
    """Doubles or halves the rate until it lies between one that is sustained and one that is not, then halves the
    distance in logarithm. A probe that gives None ends the search."""
    low, high = 0.0, math.inf
    probes: list[dict[str, Any]] = []
    rate = first
    while high > low * (1 + precision) and len(probes) < MAX_PROBES and rate > first / 2**MOST_HALVINGS:
        summary = await probe(rate)
        if summary is None:
            break
        share = summary["goodput"]["share"]
        is_kept = share is not None and share >= attainment
        probes.append({"rate": rate, "share": share, "is_sustained": is_kept,
                       "is_valid": summary["client"]["is_valid"]})
        low, high = (rate, high) if is_kept else (low, rate)
        rate = math.sqrt(low * high) if low and high < math.inf else (2 * low or high / 2)
    return {"rate": low or None, "fails_at": None if high == math.inf else high, "probes": probes,
            "is_valid": bool(probes) and all(one["is_valid"] for one in probes)}


async def interruptible(work: Awaitable[BenchResult], bench: Bench) -> BenchResult:
    """What there is, also where the interruption fell between two cells."""
    try:
        return await work
    except asyncio.CancelledError:
        bench.result.is_interrupted = True
        return bench.result

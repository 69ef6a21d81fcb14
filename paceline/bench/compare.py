"""Runs a comparison: rounds of all loads, in each load all contestants one after another, in turned order from round to
round. What has been measured is on disk after every cell, so an end at any time keeps it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import EngineError
from .arrivals import Arrivals
from .comparison import Cell, Comparison, Load, write_cell, write_run
from .entrants import Entrant
from .gauges import watching
from .load_generator import CellPlan, CellResult, Run, run_cell
from .machine_facts import calibrate, calibration_facts
from .metrics import CellFacts
from .records import Asked

WARM_UP_REQUESTS, WARM_UP_TOKENS = 8, 8    # at most, and of each answer at most
Requests = Callable[[str], list[Asked]]    # by salt


@dataclass(frozen=True, kw_only=True)
class Plan:
    """requests: the load with its words made from a salt. baseline: of ratios. setup: facts for the report."""

    requests: Requests
    loads: Sequence[Load]
    num_rounds: int
    seed: int
    baseline: str
    cap: int | None = None                 # of requests under way in an open loop
    setup: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def cell_plan(self, load: Load, warm_up: Sequence[Asked]) -> CellPlan:
        if load.unit == "clients":
            return CellPlan(name=load.name, concurrency=int(load.value), warm_up=warm_up, seed=self.seed)
        arrivals = Arrivals(kind="poisson", rate=load.value)
        return CellPlan(name=load.name, arrivals=arrivals, concurrency=self.cap, warm_up=warm_up, seed=self.seed)


class Comparing:
    """A comparison under way. on_round: told after each whole round."""

    def __init__(self, entrants: Sequence[Entrant], plan: Plan, folder: Path) -> None:
        self.is_interrupted = False
        self._entrants = entrants
        self._plan = plan
        self._folder = folder
        self._cells: list[Cell] = []
        self._calibrations: list[dict[str, float]] = []
        self._started_at = time.monotonic()
        (folder / "journals").mkdir(parents=True, exist_ok=True)

    @property
    def has_measured(self) -> bool:
        return any(cell.records for cell in self._cells)

    def comparison(self) -> Comparison:
        """As far as it has come."""
        seconds = round(time.monotonic() - self._started_at, 1)
        setup = {name: dict(facts) for name, facts in self._plan.setup.items()}
        setup.setdefault("run", {})["seconds"] = seconds
        setup["calibration"] = calibration_facts(self._calibrations)
        return Comparison(setup=setup, contestants=[one.contestant for one in self._entrants], loads=self._plan.loads,
                          cells=tuple(self._cells), baseline=self._plan.baseline,
                          num_rounds_asked=self._plan.num_rounds)

    async def run(self, on_round: Callable[[], None]) -> None:
        """Cancelled, as by Ctrl-C, it ends in good order; is_interrupted tells."""
        try:
            for number in range(1, self._plan.num_rounds + 1):
                self._calibrations.append(calibrate())
                for load in self._plan.loads:
                    await self._load(load, number)
                    if self.is_interrupted:
                        return
                on_round()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            self.is_interrupted = True

    async def _load(self, load: Load, number: int) -> None:
        """All contestants meet the same prompts; no two loads or rounds do, so no cache can know them."""
        salt = f"{self._plan.seed}-{number}-{load.name}"
        requests = self._plan.requests(salt)
        plan = self._plan.cell_plan(load, warm_up_of(self._plan.requests(f"warm-up-{salt}"), load))
        for entrant in self._entrants if number % 2 else reversed(self._entrants):
            cell = await self._cell(entrant, requests, (plan, load, number))
            self._cells.append(cell)
            write_cell(self._folder, cell)
            write_run(self._folder, self.comparison())
            self._tell(cell)
            if self.is_interrupted:
                return

    async def _cell(self, entrant: Entrant, requests: Sequence[Asked], what: tuple[CellPlan, Load, int]) -> Cell:
        plan, load, number = what
        empty = Cell(contestant=entrant.contestant.name, load=load, round=number, records=(), facts=CellFacts(
            name=load.name, arrivals=plan.arrivals.text(), concurrency=plan.concurrency))
        journal = self._folder / "journals" / empty.file_name if entrant.contestant.kind == "preset" else None
        live = _Live(f"round {number}, {load.name}, {entrant.contestant.name}")
        try:
            async with entrant.target(journal) as target, watching(entrant.base_url) as gauges:
                result = await run_cell(target, requests, plan, live.show)
        except EngineError as error:
            return replace(empty, trouble=str(error))
        finally:
            live.clear()
        self.is_interrupted = self.is_interrupted or result.is_interrupted
        start = min((record.intended_at for record in result.records if not record.is_warm_up), default=0.0)
        return replace(
            empty, records=tuple(result.records), facts=_facts(result),
            journal=None if journal is None else str(journal), samples=tuple(gauges.since(result.zero + start)),
            trouble="interrupted" if result.is_interrupted else None)

    def _tell(self, cell: Cell) -> None:
        """A line a cell, and how long it may still take."""
        wanted = len(self._entrants) * len(self._plan.loads) * self._plan.num_rounds
        seconds = (time.monotonic() - self._started_at) / len(self._cells) * (wanted - len(self._cells))
        summary = cell.summary
        rate = summary["throughput"]["output_tokens_per_second"]
        said = cell.trouble.splitlines()[0] if cell.trouble else (
            f"{summary['requests']['ok']} of {summary['requests']['measured']} requests, "
            f"{rate or 0:,.0f} output tokens/s, {summary['throughput']['window_seconds']:.1f} s"
            f"{'' if summary['client']['is_valid'] else ', INVALID'}")
        left = f"; about {seconds / 60:.0f} minutes left" if seconds >= 90 else ""
        print(f"round {cell.round}/{self._plan.num_rounds}  {cell.load.name:>12}  {cell.contestant}: {said}{left}",
              file=sys.stderr, flush=True)


def _facts(result: CellResult) -> CellFacts:
    facts = result.facts()
    return replace(facts, loop_lags=[round(lag, 6) for lag in facts.loop_lags])


def warm_up_of(requests: Sequence[Asked], load: Load) -> list[Asked]:
    """Of the load's shape, with short answers, as many as the load has at once and few at most."""
    count = min(WARM_UP_REQUESTS, int(load.value) if load.unit == "clients" else WARM_UP_REQUESTS)
    return [replace(asked, request_id=f"warm-up-{number}", after=(), think_seconds=0.0, arrival_seconds=None,
                    num_output_tokens=min(asked.num_output_tokens, WARM_UP_TOKENS))
            for number, asked in enumerate(requests[: max(count, 1)])]


class _Live:
    """How far a cell is, on a terminal."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_on = sys.stderr.isatty()
        self._shown_at = 0.0

    def show(self, run: Run) -> None:
        now = time.monotonic()
        if self._is_on and now - self._shown_at > 0.5:
            self._shown_at = now
            done = sum(not record.is_warm_up for record in run.records)
            print(f"\r{self._name}: {done} of {run.num_requests}, {run.num_under_way} under way\x1b[K", end="",
                  file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

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
from .bench_run import BenchPlan
from .bench_run import Cell as BenchCell
from .comparison import Cell, Comparison, Load, write_cell, write_run
from .entrants import Entrant
from .gauges import watching
from .load_generator import CellPlan, CellResult, run_cell
from .machine_facts import calibrate, calibration_facts
from .metrics import CellFacts
from .progress import Progress
from .records import Asked
from .slo import Slo

WARM_UP_REQUESTS, WARM_UP_TOKENS = 8, 8    # at most where nothing is said, and of each answer at most


@dataclass(frozen=True, kw_only=True)
class Plan:
    """bench: workload and cells. baseline: of ratios. setup: facts for the report."""

    bench: BenchPlan
    num_rounds: int
    baseline: str
    warm_up: int | None = None             # requests before each cell
    setup: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def cells(self) -> Sequence[BenchCell]:
        return self.bench.cells

    def place(self, cell: BenchCell, number: int) -> str:
        return f"{cell.name}/{number}"

    def requests(self, cell: BenchCell, number: int) -> list[Asked]:
        """The same for all contestants; other words in every cell and round."""
        return self.bench.asked_in(self.place(cell, number))

    def cell_plan(self, cell: BenchCell, number: int) -> CellPlan:
        """The warm-up has the load's prompts in other words, with short answers."""
        count = self.warm_up
        if count is None:
            count = min(cell.concurrency or WARM_UP_REQUESTS, WARM_UP_REQUESTS)
        plan = replace(self.bench, warm_up=count).cell_plan(cell, self.place(cell, number))
        return replace(plan, warm_up=[
            replace(asked, num_output_tokens=min(asked.num_output_tokens, WARM_UP_TOKENS)) for asked in plan.warm_up])


def load_of(cell: BenchCell) -> Load:
    if cell.arrivals.is_closed:
        return Load(value=float(cell.concurrency or 1), unit="clients")
    rate = cell.arrivals.rate
    cap = "" if cell.concurrency is None else f", at most {cell.concurrency} under way"
    if rate is None:
        return Load(value=float(cell.concurrency or 1), unit=f"arrivals by {cell.arrivals.kind}{cap}")
    return Load(value=rate, unit=f"requests/s{cap}")


class Comparing:
    """A comparison under way."""

    def __init__(self, entrants: Sequence[Entrant], plan: Plan, folder: Path) -> None:
        self.is_interrupted = False
        self._entrants = entrants
        self._plan = plan
        self._folder = folder
        self._cells: list[Cell] = []
        self._calibrations: list[dict[str, float]] = []
        self._started_at, self._seconds = time.monotonic(), 0.0
        self._progress = Progress(sys.stderr)
        (folder / "journals").mkdir(parents=True, exist_ok=True)

    @property
    def has_measured(self) -> bool:
        return any(cell.records for cell in self._cells)

    @property
    def troubles(self) -> list[str]:
        return [cell.trouble for cell in self._cells if cell.trouble is not None]

    def comparison(self) -> Comparison:
        """As far as it has come."""
        setup = {name: dict(facts) for name, facts in self._plan.setup.items()}
        setup.setdefault("run", {})["seconds"] = self._seconds
        setup["calibration"] = calibration_facts(self._calibrations)
        return Comparison(setup=setup, contestants=[one.contestant for one in self._entrants],
                          loads=[load_of(cell) for cell in self._plan.cells], cells=tuple(self._cells),
                          baseline=self._plan.baseline, num_rounds_asked=self._plan.num_rounds)

    async def run(self, on_round: Callable[[], None]) -> None:
        """on_round is told of each whole round. Cancelled, as by Ctrl-C, it ends in good order."""
        try:
            for number in range(1, self._plan.num_rounds + 1):
                self._calibrations.append(calibrate())
                for cell in self._plan.cells:
                    await self._measure_all(cell, number)
                    if self.is_interrupted:
                        return
                on_round()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            self.is_interrupted = True

    async def _measure_all(self, what: BenchCell, number: int) -> None:
        for entrant in self._entrants if number % 2 else reversed(self._entrants):
            cell = await self._measure(entrant, what, number)
            self._cells.append(cell)
            self._seconds = round(time.monotonic() - self._started_at, 1)
            write_cell(self._folder, cell)
            write_run(self._folder, self.comparison())
            self._tell(cell)
            if self.is_interrupted:
                return

    async def _measure(self, entrant: Entrant, what: BenchCell, number: int) -> Cell:
        plan, requests = self._plan.cell_plan(what, number), self._plan.requests(what, number)
        empty = Cell(contestant=entrant.contestant.name, load=load_of(what), round=number, records=(), facts=CellFacts(
            name=plan.name, arrivals=plan.arrivals.text(), concurrency=plan.concurrency))
        journal = self._folder / "journals" / empty.file_name if entrant.contestant.kind == "preset" else None
        try:
            async with entrant.target(journal) as target, watching(entrant.base_url) as gauges:
                result = await run_cell(target, requests, plan, self._progress)
        except EngineError as error:
            return replace(empty, trouble=str(error))
        self.is_interrupted = self.is_interrupted or result.is_interrupted
        start = min((record.intended_at for record in result.records if not record.is_warm_up), default=0.0)
        return replace(
            empty, records=tuple(result.records), facts=_facts(result, self._plan.bench.slos),
            journal=None if journal is None else str(journal), samples=tuple(gauges.since(result.zero + start)),
            trouble="interrupted" if result.is_interrupted else None)

    def _tell(self, cell: Cell) -> None:
        """A line a cell, and how long it may still take."""
        wanted = len(self._entrants) * len(self._plan.cells) * self._plan.num_rounds
        seconds = self._seconds / len(self._cells) * (wanted - len(self._cells))
        summary = cell.summary
        rate = summary["throughput"]["output_tokens_per_second"]
        said = cell.trouble.splitlines()[0] if cell.trouble else (
            f"{summary['requests']['ok']} of {summary['requests']['measured']} requests, "
            f"{rate or 0:,.0f} output tokens/s, {summary['throughput']['window_seconds']:.1f} s"
            f"{'' if summary['client']['is_valid'] else ', INVALID'}")
        left = f"; about {seconds / 60:.0f} minutes left" if seconds >= 90 else ""
        place = f"round {cell.round} of {self._plan.num_rounds}, {cell.load.name}, {cell.contestant}"
        self._progress.say(f"{place}: {said}{left}")


def _facts(result: CellResult, slos: Mapping[str | None, Slo]) -> CellFacts:
    facts = result.facts(slos)
    return replace(facts, loop_lags=[round(lag, 6) for lag in facts.loop_lags])

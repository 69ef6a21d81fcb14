"""What a comparison measured: contestants, loads, and a cell for each of both and each round. Kept in a folder, from
which every figure and the report can be made again.

  run.json             the set-up, the contestants, the loads, and the list of cells
  requests.jsonl       what was asked (Asked), the same for all
  records/*.jsonl      what came of it (RequestRecord), a file a cell
  lags/*.jsonl         how late the client's event loop was, seconds, a number a line
  journals/*.jsonl     what our engine decided, a file a cell of a preset
  samples/*.jsonl      what a server's /metrics told, a file a cell of a URL
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from ..engine.replay import Journaled
from ..errors import ConfigError
from .journal_view import JournalReader, JournalView, Sample
from .metrics import CellFacts, summarise
from .records import RequestRecord
from .slo import Slo

RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """kind: preset, url or peer. about: a line for people. facts: what it tells of itself, and how it was started."""

    name: str
    kind: str
    about: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """unit: "clients" (closed loop), "requests/s", perhaps with a cap, or a kind of arrivals without one rate."""

    value: float
    unit: str

    @property
    def name(self) -> str:
        if self.unit.startswith("arrivals by"):
            return self.unit.replace("arrivals by", "arrivals:")
        return f"{self.value:g} {self.unit if self.value != 1 else self.unit.replace('clients', 'client')}"


def plain_name(name: str) -> str:
    """For files."""
    return "".join(one if one.isalnum() or one == "." else "_" for one in name)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contestant under one load in one round."""

    contestant: str
    load: Load
    round: int
    records: Sequence[RequestRecord]
    facts: CellFacts
    journal: str | None = None
    samples: Sequence[Sample] = ()
    trouble: str | None = None       # why it ended early, where it did

    @property
    def file_name(self) -> str:
        return "-".join((plain_name(self.contestant), plain_name(self.load.name), f"round{self.round}.jsonl"))

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summarise(self.records, self.facts)

    @cached_property
    def view(self) -> JournalView | None:
        """Over time, where there is a journal."""
        if self.journal is None:
            return None
        return JournalReader(Journaled.read(self.journal),
                             [record.request_id for record in self.records if record.is_warm_up]).view()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """setup: sections of facts for the report. baseline: whose figures are 1 in ratios."""

    setup: Mapping[str, Mapping[str, Any]]
    contestants: Sequence[Contestant]
    loads: Sequence[Load]
    cells: Sequence[Cell]
    baseline: str
    num_rounds_asked: int = 1

    def cells_of(self, contestant: str, load: Load) -> list[Cell]:
        return [cell for cell in self.cells if cell.contestant == contestant and cell.load == load]

    def place(self, contestant: str) -> int:
        return [one.name for one in self.contestants].index(contestant)

    @property
    def num_rounds(self) -> int:
        """Rounds in which every contestant met every load."""
        wanted = len(self.contestants) * len(self.loads)
        rounds = [cell.round for cell in self.cells if cell.trouble is None]
        return sum(rounds.count(one) == wanted for one in set(rounds))


# --- the folder

def write_lines(path: Path, lines: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
                              for line in lines))


def write_cell(folder: Path, cell: Cell) -> None:
    write_lines(folder / "records" / cell.file_name, cell.records)
    write_lines(folder / "lags" / cell.file_name, cell.facts.loop_lags)
    if cell.samples:
        write_lines(folder / "samples" / cell.file_name, cell.samples)


def write_run(folder: Path, comparison: Comparison) -> None:
    run = {"setup": comparison.setup, "contestants": comparison.contestants, "loads": comparison.loads,
           "baseline": comparison.baseline, "num_rounds_asked": comparison.num_rounds_asked,
           "cells": [_entry(folder, cell) for cell in comparison.cells]}
    (folder / RUN_FILE).write_bytes(orjson.dumps(run, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))


def _entry(folder: Path, cell: Cell) -> dict[str, Any]:
    facts = {one.name: getattr(cell.facts, one.name) for one in fields(CellFacts)}
    journal = None if cell.journal is None else Path(cell.journal).name
    return {"contestant": cell.contestant, "load": asdict(cell.load), "round": cell.round, "records": cell.file_name,
            "journal": journal, "samples": cell.file_name if cell.samples else None, "trouble": cell.trouble,
            "facts": facts | {"slos": [asdict(slo) for slo in cell.facts.slos.values()], "loop_lags": []}}


def read_comparison(folder: Path) -> Comparison:
    """Raises ConfigError where the folder holds no comparison of this version."""
    path = folder / RUN_FILE
    try:
        run = orjson.loads(path.read_bytes())
        return Comparison(
            setup=run["setup"], contestants=[Contestant(**one) for one in run["contestants"]],
            loads=[Load(**one) for one in run["loads"]], cells=[_cell(folder, one) for one in run["cells"]],
            baseline=run["baseline"], num_rounds_asked=run["num_rounds_asked"])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a comparison of this version: {type(error).__name__}: {error}") from error


def _cell(folder: Path, entry: Mapping[str, Any]) -> Cell:
    samples = [] if entry["samples"] is None else _lines(folder / "samples" / entry["samples"])
    return Cell(
        contestant=entry["contestant"], load=Load(**entry["load"]), round=entry["round"], trouble=entry["trouble"],
        records=[record_of(one) for one in _lines(folder / "records" / entry["records"])],
        facts=CellFacts(**{**entry["facts"], "slos": {one["name"]: Slo(**one) for one in entry["facts"]["slos"]},
                           "server_cache": _pair(entry["facts"]["server_cache"]),
                           "loop_lags": _lines(folder / "lags" / entry["records"])}),
        journal=None if entry["journal"] is None else str(folder / "journals" / entry["journal"]),
        samples=[Sample(**one) for one in samples])


def record_of(line: Mapping[str, Any]) -> RequestRecord:
    fields_read: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
    return RequestRecord(**fields_read)


def _pair(value: Sequence[int] | None) -> tuple[int, int] | None:
    return None if value is None else (value[0], value[1])


def _lines(path: Path) -> list[Any]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]

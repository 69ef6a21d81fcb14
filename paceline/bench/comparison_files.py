"""What a comparison leaves beside its raw records: summary.json, summary.csv, the report and its pictures."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from . import png, report
from .comparison import Cell, Comparison
from .figures import Figure, figures
from .findings import Finding, find
from .ratios import RATIO_METHOD, Quantity, quantities, ratio


def write_report(folder: Path, comparison: Comparison, title: str | None = None) -> tuple[Finding, str | None]:
    """report.html, charts/*.png, summary.json and summary.csv. Gives the finding, and what a person should know where
    the pictures could not be made."""
    finding, drawn = write_page(folder, comparison, title)
    (folder / "summary.json").write_bytes(orjson.dumps(summary(comparison, finding), option=orjson.OPT_INDENT_2))
    write_csv(folder / "summary.csv", comparison)
    return finding, png.write_pngs(drawn, folder / "charts")


def write_page(folder: Path, comparison: Comparison, title: str | None = None) -> tuple[Finding, list[Figure]]:
    """report.html alone."""
    finding, drawn = find(comparison), list(figures(comparison))
    page = report.html(comparison, finding, drawn, title or title_of(comparison))
    (folder / "report.html").write_text(page, encoding="utf-8")
    return finding, drawn


def title_of(comparison: Comparison) -> str:
    names = [one.name for one in comparison.contestants]
    model = comparison.setup.get("model", {}).get("model", "")
    named = ", ".join(names[:-1]) + (f" and {names[-1]}" if len(names) > 1 else names[0])
    return f"{named}{f' on {model}' if model else ''}"


def summary(comparison: Comparison, finding: Finding) -> dict[str, Any]:
    return {
        "finding": {"winner": finding.winner, "lead": finding.lead, "weakest": finding.weakest,
                    "caveats": finding.caveats, "numbers": finding.numbers},
        "setup": comparison.setup, "baseline": comparison.baseline,
        "ratios": {"method": RATIO_METHOD, "of": list(ratios_to_baseline(comparison))},
        "cells": [{"contestant": cell.contestant, "load": cell.load.name, "round": cell.round, "trouble": cell.trouble,
                   **cell.summary} for cell in comparison.cells]}


def ratios_to_baseline(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Each contestant's figure over the baseline's: above 1 is more of it, be that good or bad."""
    for load in comparison.loads:
        for one in comparison.contestants:
            for quantity in quantities(comparison):
                found = None if one.name == comparison.baseline else ratio(
                    comparison, (one.name, comparison.baseline), load, quantity)
                if found is not None:
                    yield {"load": load.name, "contestant": one.name, "quantity": quantity.key, "ratio": found.value,
                           "low": found.low, "high": found.high, "rounds": found.count}


def write_csv(path: Path, comparison: Comparison) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        columns = quantities(comparison)
        writer.writerow(["contestant", "load", "round", "requests", "ok", *(one.key for one in columns),
                         "cache_hit_rate", "preemptions", "is_valid", "trouble"])
        writer.writerows(_row(cell, columns) for cell in comparison.cells)


def _row(cell: Cell, columns: Sequence[Quantity]) -> list[Any]:
    facts = cell.summary
    return [cell.contestant, cell.load.name, cell.round, facts["requests"]["measured"], facts["requests"]["ok"],
            *(quantity.of(facts) for quantity in columns), facts["cache_hit_rate"]["value"],
            facts["preemptions"]["value"], facts["client"]["is_valid"], cell.trouble]

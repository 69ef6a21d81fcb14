"""Comparisons made of nothing: records whose times are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.bench.comparison import Cell, Comparison, Contestant, Load
from paceline.bench.metrics import CellFacts
from paceline.bench.records import RequestRecord

NUM_REQUESTS, NUM_TOKENS = 8, 11


def clients(count: int) -> Load:
    return Load(value=float(count), unit="clients")


def record(number: int, start: float, ttft: float, tpot: float, **other: Any) -> RequestRecord:
    times = tuple(start + ttft + tpot * index for index in range(NUM_TOKENS))
    facts: dict[str, Any] = {
        "request_id": f"r{number}", "cell": "cell", "status": "ok", "intended_at": start, "sent_at": start,
        "token_times": times, "token_counts": (1,) * NUM_TOKENS, "ended_at": times[-1], "asked_prompt_tokens": 50,
        "asked_output_tokens": NUM_TOKENS, "prompt_tokens": 50, "output_tokens": NUM_TOKENS, "cached_tokens": 0,
        "preemptions": 0}
    return RequestRecord(**facts | other)


def cell(contestant: str, load: Load, number: int, seconds: float, **other: Any) -> Cell:
    """Requests one after another, each `seconds` long: half of that to the first token."""
    records = [record(index, index * seconds, seconds / 2, seconds / 2 / (NUM_TOKENS - 1), **other)
               for index in range(NUM_REQUESTS)]
    return Cell(contestant=contestant, load=load, round=number, records=records,
                facts=CellFacts(name=load.name, concurrency=int(load.value)))


def comparison(cells: Sequence[Cell], **other: Any) -> Comparison:
    """Of the contestants, loads and rounds that the cells have, in their order; the first is the baseline."""
    names = list(dict.fromkeys(one.contestant for one in cells))
    facts: dict[str, Any] = {
        "setup": {"run": {"command": "paceline compare"}, "workload": {"workload": "uniform"}},
        "contestants": [Contestant(name=name, kind="preset", about=f"{name}, made up") for name in names],
        "loads": list(dict.fromkeys(one.load for one in cells)), "cells": list(cells), "baseline": names[0],
        "num_rounds_asked": max(one.round for one in cells)}
    return Comparison(**facts | other)


def two(slow: float = 2.0, fast: float = 1.0, rounds: int = 3, **other: Any) -> Comparison:
    """`slow` and `fast` by name, at 2 and 4 clients."""
    cells = [cell(name, clients(count), number, seconds) for number in range(1, rounds + 1) for count in (2, 4)
             for name, seconds in (("slow", slow), ("fast", fast))]
    return comparison(cells, **other)

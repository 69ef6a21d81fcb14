"""The quantities that contestants are compared by, and ratios of them with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import svg
from .comparison import Comparison, Load

NUM_DRAWS = 10_000
RATIO_METHOD = (
    "geometric mean of the ratios of paired rounds (both in the same round, one soon after the other); interval: 2.5% "
    f"to 97.5% of {NUM_DRAWS:,} bootstrap draws of these rounds. With fewer than 5 rounds it spans about the least to "
    "the greatest round and is no 95% interval; with one round there is none.")


@dataclass(frozen=True, slots=True)
class Quantity:
    """One figure of a summary. is_high_good: more is better."""

    key: str
    title: str
    section: str
    figure: str
    words: Callable[[float], str]
    is_high_good: bool = False

    def of(self, summary: Mapping[str, Any]) -> float | None:
        section = summary[self.section]
        value: float | None = None if section is None else section[self.figure]
        return value


def _rate(value: float) -> str:
    return svg.figure(value)


THROUGHPUT = Quantity("output_tokens_per_second", "output tokens/s", "throughput", "output_tokens_per_second", _rate,
                      True)
REQUESTS = Quantity("requests_per_second", "requests/s", "throughput", "requests_per_second", _rate, True)
TOTAL = Quantity("total_tokens_per_second", "prompt and output tokens/s", "throughput", "total_tokens_per_second",
                 _rate, True)
RATES = (THROUGHPUT, TOTAL, REQUESTS)
LATENCIES = tuple(
    Quantity(f"{name}_{figure}", f"{short} {figure}", f"{name}_seconds", figure, svg.seconds)
    for name, short in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E")) for figure in ("p50", "p99"))
BY_LOAD = LATENCIES[::2] + LATENCIES[1::2]
E2E_P50 = LATENCIES[4]
QUANTITIES = (THROUGHPUT, REQUESTS, *LATENCIES)
GOODPUT = Quantity("good_requests_per_second", "good requests/s", "goodput", "requests_per_second", _rate, True)


def quantities(comparison: Comparison) -> tuple[Quantity, ...]:
    """Those that the comparison has figures of: goodput needs limits to keep."""
    return (*QUANTITIES, GOODPUT) if any(cell.facts.slos for cell in comparison.cells) else QUANTITIES


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over rounds: geometric mean (so that means and ratios put contestants in the same order), least and
    greatest."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Ratio:
    value: float
    low: float | None
    high: float | None
    count: int

    @property
    def is_told_apart(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def by_round(comparison: Comparison, contestant: str, load: Load, quantity: Quantity) -> dict[int, float]:
    values = {cell.round: quantity.of(cell.summary) for cell in comparison.cells_of(contestant, load)
              if cell.trouble is None}
    return {number: value for number, value in values.items() if value is not None}


def spread(comparison: Comparison, contestant: str, load: Load, quantity: Quantity) -> Spread | None:
    values = list(by_round(comparison, contestant, load, quantity).values())
    if not values:
        return None
    mean = float(np.exp(np.log(values).mean())) if min(values) > 0 else 0.0
    return Spread(mean, min(values), max(values), len(values))


def ratio(comparison: Comparison, names: tuple[str, str], load: Load, quantity: Quantity) -> Ratio | None:
    """The first's figure over the second's. None where they share no round."""
    ours, theirs = (by_round(comparison, name, load, quantity) for name in names)
    shared = [number for number in sorted(ours) if theirs.get(number, 0) > 0 and ours[number] > 0]
    return paired_ratio([ours[number] for number in shared], [theirs[number] for number in shared]) if shared else None


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """By RATIO_METHOD. The draws are seeded: the same rounds give the same interval."""
    logs = np.log(np.asarray(ours, np.float64)) - np.log(np.asarray(theirs, np.float64))
    value = float(np.exp(logs.mean()))
    if len(logs) < 2:
        return Ratio(value, None, None, len(logs))
    draws = np.random.default_rng(0).integers(0, len(logs), (NUM_DRAWS, len(logs)))
    low, high = np.exp(np.percentile(logs[draws].mean(axis=1), (2.5, 97.5)))
    return Ratio(value, float(low), float(high), len(logs))

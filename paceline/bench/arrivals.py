"""When requests come: closed loop, or open loop by a process in a visible table. Seconds from the start of a cell.

In a closed loop each of so many clients asks, waits for the whole answer and asks again: the load slows down with the
server. In an open loop requests come when they come, like those of many strangers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """One process. `rate` is requests a second."""

    kind: str = "closed"
    rate: float | None = None
    burstiness: float = 1.0                          # shape of gamma gaps: 1 is Poisson, below 1 is burstier
    steps: tuple[tuple[float, float], ...] = ()      # (rate, seconds): each rate in turn, the last one for ever
    ramp: tuple[float, float, float] | None = None   # rate at first, rate at last, seconds between them
    time_scale: float = 1.0                          # on recorded times: 0.5 is twice as fast

    def __post_init__(self) -> None:
        if self.kind not in PROCESSES:
            raise ConfigError(f"arrivals={self.kind!r} is unknown; choose from {sorted(PROCESSES)}")
        if self.kind in NEED_RATE and not (self.rate is not None and 0 < self.rate < math.inf):
            raise ConfigError(f"arrivals {self.kind} needs a rate above 0, got {self.rate}")
        if self.kind not in NEED_RATE and self.rate is not None:
            raise ConfigError(f"rate has no effect on arrivals {self.kind}; it goes with {', '.join(NEED_RATE)}")
        if self.burstiness != 1.0 and self.kind != "gamma":
            raise ConfigError(f"burstiness has no effect on arrivals {self.kind}; it goes with gamma")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"burstiness must be above 0, got {self.burstiness}")
        if bool(self.steps) != (self.kind == "steps"):
            raise ConfigError("arrivals steps and the steps (RATE:SECONDS,...) need each other")
        if (self.ramp is not None) != (self.kind == "ramp"):
            raise ConfigError("arrivals ramp and the ramp (FROM:TO:SECONDS) need each other")
        if self.time_scale != 1.0 and self.kind != "trace":
            raise ConfigError(f"time_scale has no effect on arrivals {self.kind}; it goes with trace")
        if not 0 < self.time_scale < math.inf:
            raise ConfigError(f"time_scale must be above 0, got {self.time_scale}")

    @property
    def is_closed(self) -> bool:
        return self.kind == "closed"

    def times(self, recorded: Sequence[float | None], seed: int) -> list[float]:
        """A time for each of the requests, whose own recorded times are given; not for closed loops. Raises ConfigError
        where a recorded time is missing."""
        return PROCESSES[self.kind].times(self, recorded, np.random.default_rng(seed))

    def text(self) -> str:
        return PROCESSES[self.kind].text(self)


Times = Callable[[Arrivals, Sequence[float | None], np.random.Generator], list[float]]


@dataclass(frozen=True, slots=True)
class Process:
    times: Times
    text: Callable[[Arrivals], str]


def _closed(arrivals: Arrivals, recorded: Sequence[float | None], rng: np.random.Generator) -> list[float]:
    raise ConfigError("a closed loop has no arrival times")


def burst(arrivals: Arrivals, recorded: Sequence[float | None], rng: np.random.Generator) -> list[float]:
    return [0.0] * len(recorded)


def constant(arrivals: Arrivals, recorded: Sequence[float | None], rng: np.random.Generator) -> list[float]:
    assert arrivals.rate is not None
    return [number / arrivals.rate for number in range(len(recorded))]


def gamma(arrivals: Arrivals, recorded: Sequence[float | None], rng: np.random.Generator) -> list[float]:
    """Independent gaps of mean 1/rate; with shape 1 a Poisson process. The last time is as random as the others: it is
    not pulled to n/rate, which would take variance away."""
    assert arrivals.rate is not None
    shape = arrivals.burstiness
    gaps = rng.gamma(shape, 1 / (arrivals.rate * shape), len(recorded))
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def steps(arrivals: Arrivals, recorded: Sequence[float | None], rng: np.random.Generator) -> list[float]:
    return [_reach_on_steps(arrivals.steps, total) for total in _unit_poisson(len(recorded), rng)]


def ramp(arrivals: Arrivals, recorded: Sequence[float | None], rng: np.random.Generator) -> list[float]:
    assert arrivals.ramp is not None
    return [_reach_on_ramp(*arrivals.ramp, total) for total in _unit_poisson(len(recorded), rng)]


def trace(arrivals: Arrivals, recorded: Sequence[float | None], rng: np.random.Generator) -> list[float]:
    if any(time is None for time in recorded):
        raise ConfigError("arrivals trace needs a workload with recorded times (azure-conv, azure-code, mooncake, or a "
                          "request file with arrival_seconds)")
    return [arrivals.time_scale * float(time) for time in recorded if time is not None]


def _unit_poisson(count: int, rng: np.random.Generator) -> list[float]:
    """A Poisson process of rate 1; a varying rate is a change of its clock."""
    totals: list[float] = np.cumsum(rng.exponential(1.0, count)).tolist()
    return totals


def _reach_on_steps(parts: Sequence[tuple[float, float]], total: float) -> float:
    """When so many arrivals are expected."""
    begin = 0.0
    for rate, seconds in parts[:-1]:
        if total <= rate * seconds:
            return begin + total / rate
        total -= rate * seconds
        begin += seconds
    return begin + total / parts[-1][0]


def _reach_on_ramp(first: float, last: float, seconds: float, total: float) -> float:
    """Solves first t + (last - first) t^2 / (2 seconds) = total; after the ramp the rate stays."""
    whole = (first + last) / 2 * seconds
    if total >= whole:
        return seconds + (total - whole) / last
    slope = (last - first) / seconds
    return 2 * total / (first + math.sqrt(first * first + 2 * slope * total))


def _steps_text(arrivals: Arrivals) -> str:
    return "Poisson in steps of " + ", ".join(f"{rate:g}/s for {seconds:g} s" for rate, seconds in arrivals.steps)


def _ramp_text(arrivals: Arrivals) -> str:
    assert arrivals.ramp is not None
    first, last, seconds = arrivals.ramp
    return f"Poisson, from {first:g}/s to {last:g}/s within {seconds:g} s"


PROCESSES: dict[str, Process] = {
    "closed": Process(_closed, lambda one: "closed loop"),
    "burst": Process(burst, lambda one: "all at once"),
    "constant": Process(constant, lambda one: f"constant, {one.rate:g}/s"),
    "poisson": Process(gamma, lambda one: f"Poisson, {one.rate:g}/s"),
    "gamma": Process(gamma, lambda one: f"gamma gaps of shape {one.burstiness:g}, {one.rate:g}/s"),
    "steps": Process(steps, _steps_text),
    "ramp": Process(ramp, _ramp_text),
    "trace": Process(trace, lambda one: f"as recorded, times x {one.time_scale:g}"),
}
NEED_RATE = ("constant", "gamma", "poisson")


def parse_steps(text: str) -> tuple[tuple[float, float], ...]:
    """RATE:SECONDS,RATE:SECONDS,..."""
    found = tuple(_numbers(part, 2, "steps", "RATE:SECONDS,RATE:SECONDS,...") for part in text.split(","))
    return tuple((rate, seconds) for rate, seconds in found)


def parse_ramp(text: str) -> tuple[float, float, float]:
    """FROM:TO:SECONDS."""
    first, last, seconds = _numbers(text, 3, "ramp", "FROM:TO:SECONDS")
    return first, last, seconds


def _numbers(text: str, count: int, knob: str, form: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(":"))
    except ValueError:
        values = ()
    if len(values) != count or not all(0 < value < math.inf for value in values):
        raise ConfigError(f"{knob}={text!r}: expected {form}, numbers above 0")
    return values

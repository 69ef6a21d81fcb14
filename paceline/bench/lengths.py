"""How many tokens: a fixed number, a range, or an exponential or geometric law by its mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError

MOST_MEANS = 8    # exponential and geometric draws beyond so many means are drawn again (one in 3,000)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A law over whole numbers of at least 1."""

    kind: str          # fixed | uniform | exponential | geometric
    least: int         # of fixed the value; of exponential and geometric the mean
    most: int

    def draw(self, rng: np.random.Generator) -> int:
        return LAWS[self.kind](self, rng)

    def text(self) -> str:
        if self.kind == "uniform":
            return f"uniform {self.least}..{self.most}"
        return f"always {self.least}" if self.kind == "fixed" else f"{self.kind} of mean {self.least}"


def fixed(lengths: Lengths, rng: np.random.Generator) -> int:
    return lengths.least


def uniform(lengths: Lengths, rng: np.random.Generator) -> int:
    """Both ends can come."""
    return int(rng.integers(lengths.least, lengths.most + 1))


def exponential(lengths: Lengths, rng: np.random.Generator) -> int:
    """Rounded to the nearest whole number, at least 1."""
    return _below_most(lengths, lambda: max(1, round(rng.exponential(lengths.least))))


def geometric(lengths: Lengths, rng: np.random.Generator) -> int:
    """1, 2, 3, ... with ratio 1 - 1/mean."""
    return _below_most(lengths, lambda: int(rng.geometric(1 / lengths.least)))


def _below_most(lengths: Lengths, draw: Callable[[], int]) -> int:
    while (value := draw()) > MOST_MEANS * lengths.least:
        pass
    return value


LAWS: dict[str, Callable[[Lengths, np.random.Generator], int]] = {
    law.__name__: law for law in (fixed, uniform, exponential, geometric)}


def parse_lengths(text: str, kind: str, knob: str) -> Lengths:
    """`N` or `A..B`. For exponential and geometric laws N is the mean; else N alone is a fixed number."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if match is None or int(match[1]) < 1:
        raise ConfigError(f"{knob}={text!r}: expected N or A..B, tokens, at least 1")
    least, most = int(match[1]), int(match[2] or match[1])
    if most < least:
        raise ConfigError(f"{knob}={text!r}: the range is empty")
    if kind in ("exponential", "geometric"):
        if match[2]:
            raise ConfigError(f"{knob}={text!r}: the {kind} law takes its mean, one number")
        return Lengths(kind, least, most)
    return Lengths("uniform" if most > least else "fixed", least, most)

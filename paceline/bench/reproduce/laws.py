"""Lengths and gaps without noise: the quantiles of a law in an order that a seed decides. So a few hundred of them have
the law's mean, and the same ones come on every machine and with every version of a library."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import TypeAlias

Quantile: TypeAlias = Callable[[float], float]    # of a law with mean 1


def fixed(share: float) -> float:
    return 1.0


def uniform(share: float) -> float:
    """From 0 to 2."""
    return 2.0 * share


def exponential(share: float) -> float:
    return -math.log1p(-share)


def lognormal(share: float) -> float:
    """With a standard deviation of 1 of the logarithm."""
    return math.exp(NormalDist().inv_cdf(share) - 0.5)


LAWS: Mapping[str, Quantile] = {law.__name__: law for law in (fixed, uniform, exponential, lognormal)}


def drawn(law: str, mean: float, count: int, seed: int = 0) -> list[float]:
    """The quantiles at the middles of `count` equal shares, times the mean, shuffled."""
    dice = random.Random(f"{law} {seed}")
    order = sorted(range(count), key=lambda _: dice.random())
    return [mean * LAWS[law]((place + 0.5) / count) for place in order]


def lengths(law: str, mean: float, count: int, seed: int = 0) -> list[int]:
    """In whole tokens, at least 1."""
    return [max(round(value), 1) for value in drawn(law, mean, count, seed)]

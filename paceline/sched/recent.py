"""The last so many numbers of one kind, and their quantiles. Policies learn from them what usually happens."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from math import ceil
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)


class Recent(Generic[Number]):
    """Keeps `most` numbers, by age and in order of size. None of them is NaN."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_age: deque[Number] = deque()
        self._by_size: list[Number] = []

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, number: Number) -> None:
        """The oldest one goes where there are too many."""
        if len(self._by_age) == self._most:
            del self._by_size[bisect_right(self._by_size, self._by_age.popleft()) - 1]
        self._by_age.append(number)
        insort(self._by_size, number)

    def quantile(self, fraction: float) -> Number | None:
        """Of all: the smallest that this share of them does not exceed."""
        return self._ranked(0, fraction)

    def quantile_beyond(self, number: Number, fraction: float) -> Number | None:
        """The same of those greater than `number`."""
        return self._ranked(bisect_right(self._by_size, number), fraction)

    def _ranked(self, first: int, fraction: float) -> Number | None:
        num_beyond = len(self._by_size) - first
        return self._by_size[first + max(ceil(fraction * num_beyond), 1) - 1] if num_beyond else None

"""Where time comes from. The decision core is handed `now`; only the loop around it reads a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary, fixed origin; never goes back."""
        ...


class WallClock:
    """Monotonic real time."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Time that passes only when somebody advances it: for tests, replay and the twin."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not go back: advance({seconds})")
        self._now += seconds

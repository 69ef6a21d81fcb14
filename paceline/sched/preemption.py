"""What happens when blocks run out: who yields, and how.

The scheduler offers as candidates only requests behind the one in need, in the ordering's order, so the first in order
never yields and always progresses, and a higher priority never yields to a lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

from ..request import Request
from .view import SchedulerView


class Yield(Enum):
    """How a victim gives its blocks back."""

    RECOMPUTE = "recompute"    # blocks are freed; prompt and output run again later, as far as the cache forgot them


PreemptionRule: TypeAlias = Callable[[SchedulerView, Request], Yield]
VictimRule: TypeAlias = Callable[[SchedulerView, Sequence[Request]], Request]


def recompute(view: SchedulerView, victim: Request) -> Yield:
    """No second tier needed; costs a prefill."""
    return Yield.RECOMPUTE


def latest_arrival(view: SchedulerView, candidates: Sequence[Request]) -> Request:
    """Protects the oldest: nobody is starved by newcomers."""
    return max(candidates, key=lambda request: (request.arrival_time, request.request_id))


def lowest_priority(view: SchedulerView, candidates: Sequence[Request]) -> Request:
    """The least urgent pays; among equals the latest."""
    return max(candidates, key=lambda request: (request.priority, request.arrival_time, request.request_id))


PREEMPTIONS: Mapping[str, PreemptionRule] = {"recompute": recompute}
VICTIM_RULES: Mapping[str, VictimRule] = {rule.__name__: rule for rule in (latest_arrival, lowest_priority)}

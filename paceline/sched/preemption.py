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

    NOTHING = "nothing"        # it keeps them; the one in need waits where it stands
    RECOMPUTE = "recompute"    # all are freed; prompt and output run again later, as far as the cache forgot them
    TAIL = "tail"              # the last ones are freed, as many as are missing; what they held runs again later


PreemptionRule: TypeAlias = Callable[[SchedulerView, Request], Yield]
VictimRule: TypeAlias = Callable[[SchedulerView, Sequence[Request]], Request]


def never(view: SchedulerView, victim: Request) -> Yield:
    """For admissions that let nobody in whose blocks are not assured to its end; build.py refuses it with others."""
    return Yield.NOTHING


def recompute(view: SchedulerView, victim: Request) -> Yield:
    """No second tier needed; costs a prefill."""
    return Yield.RECOMPUTE


def recompute_tail(view: SchedulerView, victim: Request) -> Yield:
    """Loses no more than is missing now. What it keeps helps nobody else while it waits."""
    return Yield.TAIL


def latest_arrival(view: SchedulerView, candidates: Sequence[Request]) -> Request:
    """Protects the oldest: nobody is starved by newcomers."""
    return max(candidates, key=lambda request: (request.arrival_time, request.request_id))


def lowest_priority(view: SchedulerView, candidates: Sequence[Request]) -> Request:
    """The least urgent pays; among equals the latest."""
    return max(candidates, key=lambda request: (request.priority, request.arrival_time, request.request_id))


def most_blocks(view: SchedulerView, candidates: Sequence[Request]) -> Request:
    """The fewest preemptions for the blocks that come free; long requests pay, and pay most in recomputation."""
    return max(candidates, key=lambda request: (view.kv.num_blocks_held(request), request.arrival_time,
                                                request.request_id))


def most_remaining(view: SchedulerView, candidates: Sequence[Request]) -> Request:
    """Those nearest to their end go on, and free their blocks the sooner."""
    return max(candidates, key=lambda request: (request.sampling.max_tokens - request.num_output_tokens,
                                                request.arrival_time, request.request_id))


PREEMPTIONS: Mapping[str, PreemptionRule] = {rule.__name__: rule for rule in (never, recompute, recompute_tail)}
PREEMPTIONS_TO_COME = frozenset({"swap", "cheapest"})    # they need a second tier of KV memory
VICTIM_RULES: Mapping[str, VictimRule] = {
    rule.__name__: rule for rule in (latest_arrival, lowest_priority, most_blocks, most_remaining)}

"""The batching regime: whether requests may join the running batch in this step, and what becomes of finished slots.

A batch begins when a request joins and nobody runs, and is over when nobody runs any more. `Batch` counts it; a regime
is asked once a step and only reads. In every regime there are max_num_seqs slots, and one is idle in a step in which no
request in it has a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .view import SchedulerView

RegimeRule: TypeAlias = Callable[[SchedulerView], bool]
OpeningTime: TypeAlias = Callable[[SchedulerView], float]

# Limits that pass within a step or two: a head they refuse still belongs to the batch that is forming.
PASSING_LIMITS = frozenset({"max_num_batched_tokens", "prefix_in_flight"})


@dataclass(slots=True)
class Batch:
    """The requests that joined since nobody ran."""

    num_members: int = 0            # finished ones included
    is_open: bool = False           # still forming: the last step ran out of token budget before it ran out of queue


@dataclass(frozen=True, slots=True)
class Regime:
    """may_join: asked once a step. opens_at: asked when nobody runs; the time from which may_join says yes, were nobody
    to arrive. keeps_slots: a member's slot is taken until the whole batch has ended."""

    may_join: RegimeRule
    opens_at: OpeningTime = lambda view: view.now
    keeps_slots: bool = True
    is_padded: bool = False


def always(view: SchedulerView) -> bool:
    """Requests join and leave at any step."""
    return True


def between_batches(view: SchedulerView) -> bool:
    """A batch takes whoever waits, then runs until its longest member has ended."""
    return view.batch.num_members == 0 or view.batch.is_open


def full_or_due(view: SchedulerView) -> bool:
    """As between_batches, but a batch that is not full waits for others until its oldest member is due."""
    if view.batch.num_members:
        return view.batch.is_open
    return len(view.waiting) >= view.config.max_num_seqs or view.now >= oldest_is_due(view)


def oldest_is_due(view: SchedulerView) -> float:
    """When the request that has been queued longest will have waited batch_timeout_seconds; now, where it is late."""
    oldest = view.waiting.oldest()
    due_at = view.now if oldest is None else oldest.arrival_time + view.config.batch_timeout_seconds
    return due_at if len(view.waiting) < view.config.max_num_seqs else min(due_at, view.now)


REGIMES: Mapping[str, Regime] = {
    "static": Regime(between_batches),
    "static_padded": Regime(between_batches, is_padded=True),
    "dynamic": Regime(full_or_due, oldest_is_due),
    "continuous": Regime(always, keeps_slots=False),
}

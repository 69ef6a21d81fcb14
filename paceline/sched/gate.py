"""Whether the queue may interrupt those who run, asked once a step before anybody starts. A rule answers None (it may)
or the Refusal of the head.

A prefill makes every decoding request wait, so it may pay to let some more requests gather first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import TypeAlias

from ..request import Request
from .plan import Refusal
from .view import SchedulerView

GateRule: TypeAlias = Callable[[SchedulerView, Request], Refusal | None]


def no_gate(view: SchedulerView, head: Request) -> Refusal | None:
    """Always open."""
    return None


def waiting_served(view: SchedulerView, head: Request) -> Refusal | None:
    """Open when nobody runs, when waiting_served_ratio requests wait for each that runs, or when max_waiting_tokens
    steps have run since a request last started (so that a few are not kept waiting for ever).

    The rule of text-generation-inference's router, under the names of its launcher's arguments.
    """
    num_needed = max(ceil(view.config.waiting_served_ratio * len(view.running)), 1)
    is_overdue = view.observations.num_steps_since_start >= view.config.max_waiting_tokens
    if not view.running or is_overdue or len(view.waiting) >= num_needed:
        return None
    return Refusal(head.request_id, "waiting_served_ratio", num_needed, len(view.waiting))


GATES: Mapping[str, GateRule] = {"none": no_gate, "waiting_served": waiting_served}

"""Who is served first. An ordering is a key function over those who wait, and one over those who run.

A static key never changes while a request waits; a dynamic one is asked again each step; lanes are tenants, ranked anew
whenever somebody may start, each with a static key inside (`wait_queue` keeps all three). Every key ends in the request
id: that is what makes two runs the same. The key over those who run is always static, so that two of them cannot take
their blocks from each other in turn.

Waiting that lifts a priority is a static key: priority - (now - arrival) / aging orders requests like
priority * aging + arrival, because now is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..request import Request
from .view import SchedulerView

OrderingKey: TypeAlias = tuple[float | str, ...]
KeyFunction: TypeAlias = Callable[[Request, SchedulerView], OrderingKey]
LaneRank: TypeAlias = Callable[[str], tuple[float, float]]    # of a tenant: what it had for sure, what is promised


def fcfs(request: Request, view: SchedulerView) -> OrderingKey:
    """First come, first served."""
    return (request.arrival_time, request.request_id)


def priority(request: Request, view: SchedulerView) -> OrderingKey:
    """Lower priority numbers first, equals in order of arrival.

    With priority_aging_seconds a request of priority p is passed only by those of priority q < p that come less than
    (p - q) * priority_aging_seconds after it; without, it may wait for ever.
    """
    aging = view.config.priority_aging_seconds
    if aging is None:
        return (request.priority, request.arrival_time, request.request_id)
    return (request.priority * aging + request.arrival_time, request.arrival_time, request.request_id)


def shortest_prompt(request: Request, view: SchedulerView) -> OrderingKey:
    """The fewest prompt tokens first, of which each second waited takes aging_tokens_per_second away: a request is
    passed only by those that come less than its prompt / aging_tokens_per_second seconds after it."""
    aged = request.num_prompt_tokens + request.arrival_time * view.config.aging_tokens_per_second
    return (aged, request.arrival_time, request.request_id)


def longest_prefix(request: Request, view: SchedulerView) -> OrderingKey:
    """The most tokens in the prefix cache first, to which each second waited adds aging_tokens_per_second: a request is
    passed only by those that come less than max_model_len / aging_tokens_per_second seconds after it."""
    aged = request.arrival_time * view.config.aging_tokens_per_second - view.kv.look_up(request).num_tokens
    return (aged, request.arrival_time, request.request_id)


def least_served(view: SchedulerView) -> LaneRank:
    """How much service a tenant has had: what its counter says, and prompts that run but are not computed yet.

    While two tenants both wait, what they are served (in weighted tokens over their weights) differs by at most 2 U at
    any time, U being the charge of the longest prompt and of all output that the requests running at once can give.
    """
    weight = view.config.fair_input_weight
    promised: dict[str, float] = {}
    for request in view.running:
        num_tokens = request.num_prompt_tokens - request.num_computed_tokens
        if num_tokens > 0 and not request.num_preemptions:
            share = num_tokens * weight / view.config.weight_of_tenant(request.tenant)
            promised[request.tenant] = promised.get(request.tenant, 0.0) + share
    return lambda tenant: (view.observations.service.of(tenant), promised.get(tenant, 0.0))


@dataclass(frozen=True, slots=True)
class Ordering:
    """key: of those who wait, smallest first; with lanes, inside a lane. running_key: the first keeps its blocks the
    longest."""

    key: KeyFunction
    is_static: bool
    running_key: KeyFunction = fcfs
    lanes: Callable[[SchedulerView], LaneRank] | None = None


ORDERINGS: Mapping[str, Ordering] = {
    "fcfs": Ordering(fcfs, is_static=True),
    "priority": Ordering(priority, is_static=True, running_key=priority),
    "shortest_prompt": Ordering(shortest_prompt, is_static=True),
    "longest_prefix": Ordering(longest_prefix, is_static=False),
    "fair": Ordering(fcfs, is_static=True, lanes=least_served),
}

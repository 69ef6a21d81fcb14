"""When a request would end, told from what past steps measured. Pure functions of the view.

A forecast is no promise: it is the expectation under the load of the recent past, and 0 seconds for what was never
measured, so that an engine which knows nothing refuses nobody.
"""

from __future__ import annotations

from ..errors import RequestError
from ..request import Request
from .ordering import Ordering, OrderingKey
from .view import SchedulerView

TYPICAL = 0.5    # quantile of the output lengths of like requests


def seconds_to_serve(view: SchedulerView, request: Request) -> float:
    """From its start to its end, were it to start now: its prompt, then a typical output of like requests."""
    pace = view.observations.pace
    length = view.observations.output_lengths.expected(request, TYPICAL)
    num_output_tokens = 1 if length is None else min(length, request.sampling.max_tokens)
    num_prompt_tokens = request.num_tokens - view.kv.look_up(request).num_tokens
    return num_prompt_tokens * pace.prefill_token_seconds + (num_output_tokens - 1) * pace.decode_step_seconds


def seconds_to_wait(view: SchedulerView, request: Request, ordering: Ordering) -> float:
    """Until it starts: those ahead and it itself each wait for one of those running to end. 0 while there is room and
    nobody waits ahead. Looks at every request that waits."""
    key: OrderingKey = ordering.key(request, view)
    num_ahead = sum(1 for other in view.waiting if ordering.key(other, view) < key)
    if not num_ahead and len(view.running) < view.config.max_num_seqs:
        return 0.0
    return (num_ahead + 1) * view.observations.pace.request_seconds / max(len(view.running), 1)


def would_end_late(view: SchedulerView, request: Request) -> bool:
    """Whether it would miss its deadline though it started now."""
    return request.deadline is not None and view.now + seconds_to_serve(view, request) > request.deadline


def is_hopeless(view: SchedulerView, request: Request, ordering: Ordering) -> bool:
    """Whether a request that has not started yet is to end instead, because its deadline cannot be kept any more."""
    return ordering.keeps_deadlines and request.first_scheduled_at is None and would_end_late(view, request)


def refuse_infeasible(view: SchedulerView, request: Request, ordering: Ordering) -> None:
    """At the door. Raises RequestError where by the forecast the request would end after its deadline."""
    if request.deadline is None or not ordering.keeps_deadlines:
        return
    wait, serve = seconds_to_wait(view, request, ordering), seconds_to_serve(view, request)
    left = request.deadline - view.now
    if wait + serve > left:
        raise RequestError(f"timeout: {left:.3g} s cannot be kept; by what was measured of late this request would "
                           f"wait {wait:.3g} s and then take {serve:.3g} s", "timeout", "deadline_infeasible")

"""Where a request is and why: for whoever asks, between two steps. Costs a step nothing but a note of who has ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..request import Request, RequestStatus
from .batching import Batch
from .view import SchedulerView

if TYPE_CHECKING:
    from .scheduler import Scheduler

MAX_REMEMBERED = 4096    # choices that have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Why a request waits. Of the head, what it needs; who stands behind it needs the head to start first."""

    cause: str                 # the limit that refused the head; or "step" or "preemption", see ledger.py
    seconds: float             # for so long this request has been held by it
    needed: int | None
    available: int | None
    head_id: str | None
    position: int | None       # 0: it is the head; None: this ordering ranks anew in each step


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """One choice. Seconds are of the phases it has reached, so far."""

    request_id: str
    status: str                # a RequestStatus
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int   # of prompt and output, whose K/V is there now
    num_cached_tokens: int
    num_blocks: int
    num_preemptions: int
    num_recomputed_tokens: int
    queue_seconds: float       # arrival to first scheduled
    prefill_seconds: float | None
    decode_seconds: float | None
    finish_reason: str | None = None
    hold: Hold | None = None
    predicted_start_seconds: float | None = None    # from now, at the pace of late; None: unknown, or it runs


class Ended:
    """The last choices that have ended."""

    def __init__(self) -> None:
        self._reports: OrderedDict[str, RequestReport] = OrderedDict()

    def note(self, request: Request, now: float) -> None:
        """It has ended, and holds nothing that anybody could use."""
        self._reports[request.request_id] = report_of(request, 0, now)
        if len(self._reports) > MAX_REMEMBERED:
            self._reports.popitem(last=False)

    def find(self, request_id: str) -> RequestReport | None:
        return self._reports.get(request_id)


def report_of(
    request: Request, num_blocks: int, now: float, hold: Hold | None = None, predicted_start: float | None = None
) -> RequestReport:
    end = now if request.finished_at is None else request.finished_at
    started, first = request.first_scheduled_at, request.first_token_at
    return RequestReport(
        request_id=request.request_id,
        status=request.status.value,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=num_blocks,
        num_preemptions=request.num_preemptions,
        num_recomputed_tokens=request.num_recomputed_tokens,
        queue_seconds=(end if started is None else started) - request.arrival_time,
        prefill_seconds=None if started is None else (end if first is None else first) - started,
        decode_seconds=None if first is None else end - first,
        finish_reason=None if request.finish_reason is None else request.finish_reason.value,
        hold=hold,
        predicted_start_seconds=predicted_start,
    )


def reports_of(scheduler: Scheduler, request_ids: Iterable[str], now: float) -> tuple[RequestReport, ...]:
    """Of those that are known, in this order. Reads only; costs a look at everybody who waits."""
    view = SchedulerView(scheduler.waiting, scheduler.running, scheduler.kv, now, scheduler.config,
                         scheduler.observations, scheduler.max_model_len, Batch())
    unfinished = {request.request_id: request for request in (*scheduler.running, *scheduler.waiting)}
    found = []
    for request_id in request_ids:
        request = unfinished.get(request_id)
        report = scheduler.ledger.ended.find(request_id) if request is None else _unfinished(scheduler, request, view)
        found += [] if report is None else [report]
    return tuple(found)


def _unfinished(scheduler: Scheduler, request: Request, view: SchedulerView) -> RequestReport:
    num_blocks = view.kv.num_blocks_held(request)
    if request.status is RequestStatus.RUNNING:
        return report_of(request, num_blocks, view.now)
    queue_hold, refusal = scheduler.ledger.hold, scheduler.ledger.hold.refusal
    position = _position(scheduler, request, view)
    hold = Hold(
        cause=queue_hold.cause,
        seconds=max(view.now - max(queue_hold.since, scheduler.ledger.queued_at[request.request_id]), 0.0),
        needed=None if refusal is None else refusal.needed,
        available=None if refusal is None else refusal.available,
        head_id=None if refusal is None else refusal.request_id,
        position=position,
    )
    predicted_start = None if position is None else scheduler.ledger.seconds_until_start(position)
    return report_of(request, num_blocks, view.now, hold, predicted_start)


def _position(scheduler: Scheduler, request: Request, view: SchedulerView) -> int | None:
    ordering = scheduler.policies.ordering
    if not ordering.is_static or ordering.lanes is not None:
        return None
    own = ordering.key(request, view)
    return sum(ordering.key(other, view) < own for other in scheduler.waiting)

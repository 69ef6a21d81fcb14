"""The queue of those who wait and hold no blocks. Owns who is in it; the ordering says who is next.

A static ordering is a heap, and a step costs the same however many wait. A dynamic one is asked about a bounded window
of those who wait longest. With lanes there is a heap for each tenant, and one over the tenants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Protocol

from ..errors import InvariantError
from ..request import Request, RequestStatus
from .ordering import Ordering, OrderingKey
from .view import SchedulerView

DYNAMIC_WINDOW = 64    # waiting requests a dynamic ordering looks at in one step


class WaitQueue:
    """Requests that hold no blocks, smallest key first."""

    def __init__(self, ordering: Ordering) -> None:
        self._waiting: OrderedDict[str, Request] = OrderedDict()    # in order of entry, but preempted ones in front
        self._picker = _picker(ordering, self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def push(self, request: Request, view: SchedulerView) -> None:
        if request.request_id in self._waiting:
            raise InvariantError(f"{request.request_id} waits twice")
        self._waiting[request.request_id] = request
        if request.status is RequestStatus.PREEMPTED:
            self._waiting.move_to_end(request.request_id, last=False)
        self._picker.push(request, view)

    def head(self, view: SchedulerView) -> Request | None:
        """Who is next; stays in the queue."""
        return self._picker.head(view) if self._waiting else None

    def oldest(self) -> Request | None:
        """Who has been queued longest."""
        return next(iter(self._waiting.values()), None)

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._picker.remove(request)

    def reordered(self, ordering: Ordering, view: SchedulerView) -> WaitQueue:
        """The same requests in a queue with another ordering."""
        queue = WaitQueue(ordering)
        for request in self:
            queue._waiting[request.request_id] = request
            queue._picker.push(request, view)
        return queue


class _Picker(Protocol):
    """Finds the head. Told of every request that comes and goes."""

    def push(self, request: Request, view: SchedulerView) -> None: ...

    def head(self, view: SchedulerView) -> Request: ...

    def remove(self, request: Request) -> None: ...


def _picker(ordering: Ordering, waiting: OrderedDict[str, Request]) -> _Picker:
    if ordering.lanes is not None:
        return _Lanes(ordering)
    return _Heap(ordering) if ordering.is_static else _Window(ordering, waiting)


class _Heap:
    """By a key that does not change. Removal from the middle leaves a stale entry behind."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._entries: list[tuple[OrderingKey, int, Request]] = []    # the number only parts ids that were used again
        self._num_pushes = 0                                          # while a stale entry was left
        self._live: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._live)

    def push(self, request: Request, view: SchedulerView) -> None:
        self._live[request.request_id] = request
        self._num_pushes += 1
        heappush(self._entries, (self._ordering.key(request, view), self._num_pushes, request))

    def head(self, view: SchedulerView) -> Request:
        while not self._is_live(self._entries[0]):
            heappop(self._entries)
        return self._entries[0][2]

    def remove(self, request: Request) -> None:
        del self._live[request.request_id]
        if self._entries[0][2] is request:
            heappop(self._entries)
        elif len(self._entries) > 2 * len(self._live) + 64:    # mostly stale: work paid for by the removals before
            self._entries = [entry for entry in self._entries if self._is_live(entry)]
            heapify(self._entries)

    def _is_live(self, entry: tuple[OrderingKey, int, Request]) -> bool:
        return self._live.get(entry[2].request_id) is entry[2]


class _Window:
    """By a key that changes, over the first of the queue. Ranked once a step: a view stands for one."""

    def __init__(self, ordering: Ordering, waiting: OrderedDict[str, Request]) -> None:
        self._ordering = ordering
        self._waiting = waiting
        self._ranked: list[Request] = []                 # the last is next
        self._ranked_for: SchedulerView | None = None

    def push(self, request: Request, view: SchedulerView) -> None:
        self._ranked_for = None

    def head(self, view: SchedulerView) -> Request:
        if self._ranked_for is not view or not self._ranked:
            window = islice(self._waiting.values(), DYNAMIC_WINDOW)
            self._ranked = sorted(window, key=lambda request: self._ordering.key(request, view), reverse=True)
            self._ranked_for = view
        return self._ranked[-1]

    def remove(self, request: Request) -> None:
        if self._ranked and self._ranked[-1] is request:
            self._ranked.pop()
        else:
            self._ranked_for = None


class _Lanes:
    """A heap for each tenant, and one over the tenants by what they are sure to have been served when last looked at.

    That only grows while a tenant waits, so an entry never stands too far back: those whose rank may be the least are
    found by looking until the next entry is already beyond the best.
    """

    def __init__(self, ordering: Ordering) -> None:
        assert ordering.lanes is not None
        self._ordering = ordering
        self._rank_of = ordering.lanes
        self._lanes: dict[str, _Heap] = {}
        self._entry_of: dict[str, int] = {}                   # the number of a lane's one living entry
        self._entries: list[tuple[float, str, int]] = []
        self._num_entries = 0

    def push(self, request: Request, view: SchedulerView) -> None:
        lane = self._lanes.get(request.tenant)
        if lane is None:
            lane = self._lanes[request.tenant] = _Heap(self._ordering)
            self._enter(request.tenant, self._rank_of(view)(request.tenant)[0])
        lane.push(request, view)

    def head(self, view: SchedulerView) -> Request:
        rank_of = self._rank_of(view)
        looked_at: list[tuple[str, float]] = []
        best: tuple[float, OrderingKey, str] | None = None    # of equals, the tenant whose request is first
        while self._entries and (best is None or self._entries[0][0] <= best[0]):
            _, tenant, number = heappop(self._entries)
            if self._entry_of.get(tenant) != number:
                continue                                      # its lane was empty since
            sure, promised = rank_of(tenant)
            looked_at.append((tenant, sure))
            one = (sure + promised, self._ordering.key(self._lanes[tenant].head(view), view), tenant)
            best = one if best is None else min(best, one)
        for tenant, sure in looked_at:
            self._enter(tenant, sure)
        if best is None:
            raise InvariantError("requests wait in no lane")
        return self._lanes[best[2]].head(view)

    def remove(self, request: Request) -> None:
        lane = self._lanes[request.tenant]
        lane.remove(request)
        if not len(lane):
            del self._lanes[request.tenant], self._entry_of[request.tenant]

    def _enter(self, tenant: str, sure: float) -> None:
        self._num_entries += 1
        self._entry_of[tenant] = self._num_entries
        heappush(self._entries, (sure, tenant, self._num_entries))

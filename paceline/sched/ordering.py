"""Who is served first, and the queue of those who wait.

An ordering is a key function. A static one never changes while a request waits, so the queue is a heap and a step costs
the same however many wait; a dynamic one is asked again each step, on a bounded window of the longest waiting.
Every key ends in the request id: that is what makes two runs the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TypeAlias

from ..errors import InvariantError
from ..request import Request
from .view import SchedulerView

OrderingKey: TypeAlias = tuple[float | str, ...]

DYNAMIC_WINDOW = 64    # waiting requests a dynamic ordering looks at in one step


@dataclass(frozen=True, slots=True)
class Ordering:
    key: Callable[[Request, SchedulerView], OrderingKey]    # smallest first
    is_static: bool


def fcfs(request: Request, view: SchedulerView) -> OrderingKey:
    """First come, first served."""
    return (request.arrival_time, request.request_id)


def priority(request: Request, view: SchedulerView) -> OrderingKey:
    """Lower priority numbers first; equals in order of arrival."""
    return (request.priority, request.arrival_time, request.request_id)


ORDERINGS: Mapping[str, Ordering] = {
    "fcfs": Ordering(fcfs, is_static=True),
    "priority": Ordering(priority, is_static=True),
}


class WaitQueue:
    """Requests that hold no blocks, smallest key first. Removal from the middle leaves a stale entry behind."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._heap: list[tuple[OrderingKey, int, Request]] = []    # used by static orderings; the number only parts ids
        self._num_pushes = 0                                       # that were used again while a stale entry was left
        self._waiting: dict[str, Request] = {}                # in order of entry

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def push(self, request: Request, view: SchedulerView) -> None:
        if request.request_id in self._waiting:
            raise InvariantError(f"{request.request_id} waits twice")
        self._waiting[request.request_id] = request
        if self._ordering.is_static:
            self._num_pushes += 1
            heappush(self._heap, (self._ordering.key(request, view), self._num_pushes, request))

    def head(self, view: SchedulerView) -> Request | None:
        """Who is next; stays in the queue."""
        if not self._waiting:
            return None
        if not self._ordering.is_static:
            window = islice(self._waiting.values(), DYNAMIC_WINDOW)
            return min(window, key=lambda request: self._ordering.key(request, view))
        while not self._is_live(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][2]

    def oldest(self) -> Request | None:
        """Who has been queued longest."""
        return next(iter(self._waiting.values()), None)

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]
        if self._heap and self._heap[0][2] is request:
            heappop(self._heap)
        elif len(self._heap) > 2 * len(self._waiting) + 64:    # mostly stale: work paid for by the removals before
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def _is_live(self, entry: tuple[OrderingKey, int, Request]) -> bool:
        return self._waiting.get(entry[2].request_id) is entry[2]

    def reordered(self, ordering: Ordering, view: SchedulerView) -> WaitQueue:
        """The same requests in a queue with another ordering."""
        queue = WaitQueue(ordering)
        for request in self:
            queue.push(request, view)
        return queue

"""What must hold between two steps. For tests and debugging."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from ..errors import InvariantError
from ..request import Request


def check_queues(
    requests: Mapping[str, Request], running: Sequence[Request], waiting: Iterable[Request], keeping_ids: Set[str]
) -> None:
    """Raises InvariantError unless each unfinished request is in one queue and those who wait hold what is known."""
    queued = [*running, *waiting]
    if len(queued) != len(requests) or any(requests.get(request.request_id) is not request for request in queued):
        raise InvariantError("an unfinished request is in no queue, or in two")
    if {request.request_id for request in queued[len(running) :] if request.block_tables} != keeping_ids:
        raise InvariantError("a waiting request holds blocks that nobody knows of")

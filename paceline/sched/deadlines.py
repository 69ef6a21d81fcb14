"""When requests must have ended. Owns their deadlines; the scheduler owns the requests and ends them."""

from __future__ import annotations

from ..request import Request

NEVER = float("inf")


class Deadlines:
    """Of unfinished requests that have one. Looks through them only when the earliest may have come."""

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}
        self._earliest = NEVER    # at most the earliest: it is not looked for anew when that request ends

    @property
    def earliest(self) -> float:
        """No deadline is before this."""
        return self._earliest

    def watch(self, request: Request) -> None:
        if request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline
            self._earliest = min(self._earliest, request.deadline)

    def forget(self, request: Request) -> None:
        self._deadlines.pop(request.request_id, None)

    def due(self, now: float) -> list[str]:
        """Ids whose deadline has come, the earliest first. Changes nothing that can be seen."""
        if now < self._earliest:
            return []
        due = sorted((deadline, request_id) for request_id, deadline in self._deadlines.items() if deadline <= now)
        self._earliest = min((deadline for deadline in self._deadlines.values() if deadline > now), default=NEVER)
        return [request_id for _, request_id in due]

"""Blocks that outlive their request: until the plan in flight has landed, or while its batch pads finished rows."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvariantError
from ..kv.manager import KVCacheManager
from ..request import Request


class EndedRequests:
    """Requests that have ended and still hold blocks."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self.in_flight: list[Request] = []    # a plan that is under way may read and write their blocks
        self.padding: list[Request] = []      # finished members of the batch that runs

    def landed(self) -> None:
        """No plan is under way."""
        for request in self.in_flight:
            self._kv.free(request)
        self.in_flight.clear()

    def stop_padding(self, is_in_flight: bool) -> None:
        """The batch is over, or the regime pads no more."""
        self.in_flight += self.padding
        self.padding.clear()
        if not is_in_flight:
            self.landed()

    def check(self, running: Sequence[Request]) -> None:
        if self.padding and not running:
            raise InvariantError("blocks are held for a batch that is over")

    def give_way(self) -> bool:
        """Frees the blocks of one that only pads. False: there is none."""
        if not self.padding:
            return False
        self._kv.free(self.padding.pop())
        return True

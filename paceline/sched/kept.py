"""Blocks of requests that do not run: what a victim kept of its prefix while it waits. They go before anyone who runs
loses a block, the last in order first."""

from __future__ import annotations

from collections.abc import KeysView

from ..kv.manager import KVCacheManager
from ..request import Request
from .counters import Counters
from .ordering import Ordering
from .view import SchedulerView


class KeptBlocks:
    """The victims that wait with a part of their blocks."""

    def __init__(self, kv: KVCacheManager, counters: Counters) -> None:
        self._kv = kv
        self._counters = counters
        self._keeping: dict[str, Request] = {}

    @property
    def request_ids(self) -> KeysView[str]:
        return self._keeping.keys()

    def shrink(self, request: Request, num_missing: int | None) -> int:
        """Takes a request's last blocks until `num_missing` came free, or all of them; the rest is remembered here.
        Returns how many came free."""
        self._counters.lost(request)
        num_freed_blocks = self._kv.free_tail(request, num_missing)
        if request.block_tables:
            self._keeping[request.request_id] = request
        else:
            self._keeping.pop(request.request_id, None)
        return num_freed_blocks

    def give_up(self, request: Request) -> bool:
        """All that it kept. False: it keeps nothing."""
        if request.request_id not in self._keeping:
            return False
        self.shrink(request, None)
        return True

    def forget(self, request: Request) -> None:
        """It runs again, or has ended."""
        self._keeping.pop(request.request_id, None)

    def take(self, num_missing: int, ordering: Ordering, view: SchedulerView, spared: Request | None = None) -> bool:
        """Frees blocks of the last in order, `spared` excepted. False: nobody keeps any."""
        others = [request for request in self._keeping.values() if request is not spared]
        if not others:
            return False
        self.shrink(max(others, key=lambda request: ordering.running_key(request, view)), num_missing)
        return True

"""Block copies the scheduler has planned and that the executor has not yet reported done."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import InvariantError
from ..kv.manager import BlockCopy, KVCacheManager
from .plan import Transfer, TransferKind


class CopiesUnderWay:
    """By transfer id, numbered since start."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._copies: dict[int, BlockCopy] = {}
        self._next_transfer_id = 0

    def begin(self, copy: BlockCopy) -> Transfer:
        transfer_id = self._next_transfer_id
        self._next_transfer_id += 1
        self._copies[transfer_id] = copy
        return Transfer(transfer_id, TransferKind.COPY, copy.kv_group, copy.source, copy.destination)

    def end(self, transfer_ids: Iterable[int]) -> None:
        """The executor reports them done: their blocks may be reused."""
        for transfer_id in transfer_ids:
            copy = self._copies.pop(transfer_id, None)
            if copy is None:
                raise InvariantError(f"transfer {transfer_id} was reported done, but was not under way")
            self._kv.copy_done(copy)

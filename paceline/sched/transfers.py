"""Copies of blocks under way: from the plan that starts one to the result that reports it done."""

from __future__ import annotations

from ..errors import InvariantError
from ..kv.manager import BlockCopy
from .plan import StepResult, Transfer, TransferKind


class CopiesUnderWay:
    """Copies by transfer id."""

    def __init__(self) -> None:
        self._copies: dict[int, BlockCopy] = {}
        self._next_id = 0

    def begin(self, copy: BlockCopy) -> Transfer:
        transfer = Transfer(self._next_id, TransferKind.COPY, copy.kv_group, copy.source, copy.destination)
        self._copies[self._next_id] = copy
        self._next_id += 1
        return transfer

    def land(self, result: StepResult) -> list[BlockCopy]:
        """The copies that a result reports done."""
        landed = []
        for transfer_id in result.transfers_done:
            copy = self._copies.pop(transfer_id, None)
            if copy is None:
                raise InvariantError(f"transfer {transfer_id} was reported done, but was not under way")
            landed.append(copy)
        return landed

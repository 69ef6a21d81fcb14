"""Blocks run out while requests run: who gives some up so that one can go on. Asks the policies; others act."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ..errors import InvariantError
from ..request import Request
from .ended import EndedRequests
from .kept import KeptBlocks
from .policies import Policies
from .preemption import Yield
from .view import SchedulerView

Preempt: TypeAlias = Callable[[Request, int | None], None]    # (victim, blocks that are missing; None: takes all)


class Room:
    """First those who do not run give way, then a victim behind the request in need; its last resort is to wait."""

    def __init__(self, ended: EndedRequests, kept: KeptBlocks) -> None:
        self._ended = ended
        self._kept = kept

    def make(
        self, request: Request, num_new_tokens: int, policies: Policies, view: SchedulerView, preempt: Preempt
    ) -> bool:
        """Frees blocks until the request can run so many tokens. False where it must itself wait."""
        kv, running = view.kv, view.running
        while (num_missing := kv.num_blocks_to_continue(request, num_new_tokens) - kv.num_free_blocks) > 0:
            if self._ended.give_way() or self._kept.take(num_missing, policies.ordering, view):
                continue
            position = running.index(request)
            behind = running[position + 1 :]
            if not behind and position == 0:
                if not kv.num_in_transit_blocks:
                    raise InvariantError("a request alone does not fit the pool it was accepted for")
                return False                                # a transfer still holds what it needs
            victim = policies.victim(view, behind) if behind else request
            how = policies.preemption(view, victim)
            if how is Yield.NOTHING or (how is Yield.TAIL and victim is request):
                return False                                # those ahead of it go on and will free theirs
            preempt(victim, num_missing if how is Yield.TAIL else None)
            if victim is request:
                return False
        return True

"""How a step's token budget is split. A rule answers how many of a request's tokens run in this step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from .view import SchedulerView

# (view, tokens the request could run, budget left, requests behind it that need one token each) -> tokens to run now
ChunkingRule: TypeAlias = Callable[[SchedulerView, int, int, int], int]


def fixed(view: SchedulerView, num_uncomputed_tokens: int, budget_left: int, num_decodes_behind: int) -> int:
    """Prefill takes what decode leaves, both in one step; but at least one token, so the first in order progresses."""
    return min(num_uncomputed_tokens, budget_left, max(budget_left - num_decodes_behind, 1))


CHUNKINGS: Mapping[str, ChunkingRule] = {"fixed": fixed}

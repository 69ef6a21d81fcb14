"""Layers that look back equally far form a group; every request has a block table for each. Arithmetic over positions.

All groups hold equally many layers, so one pool serves them all and a block may serve any group. A group with a window
needs only the blocks that some later query can still see; those behind are given back and NULL_BLOCK stands for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL_BLOCK = -1    # in a block table: tokens that no query will read again


@dataclass(frozen=True, slots=True)
class KVGroup:
    """window: tokens a query sees, itself included; None: all before it."""

    window: int | None = None

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that the query at `position`, or any after it, reads."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """The most that a request of `num_tokens` ever holds when no step runs more than max_step_tokens of it."""
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        num_seen = self.window - 1 + max_step_tokens    # by one step; a run of tokens may begin anywhere in a block
        return min(num_blocks, -(-(num_seen - 1) // block_size) + 1)


FULL_ATTENTION = (KVGroup(),)


def real_blocks(table: Iterable[int]) -> tuple[int, ...]:
    return tuple(block_id for block_id in table if block_id != NULL_BLOCK)


@dataclass(frozen=True, slots=True)
class KVBudget:
    """What a pool can hold of one request."""

    num_blocks: int
    block_size: int
    groups: Sequence[KVGroup]
    max_step_tokens: int

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks of all groups that a request of this length holds at most."""
        return sum(group.most_blocks(num_tokens, self.block_size, self.max_step_tokens) for group in self.groups)

    def num_tokens_that_fit(self, limit: int) -> int:
        """The longest request, up to `limit` tokens, that fits the pool when it is alone. 0: none does."""
        if self.blocks_needed(limit) <= self.num_blocks:
            return limit
        low, high = 0, -(-limit // self.block_size)    # in blocks: low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.blocks_needed(middle * self.block_size) <= self.num_blocks:
                low = middle
            else:
                high = middle
        return low * self.block_size

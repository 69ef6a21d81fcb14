"""Which request holds which blocks. Owns block tables: look-up, allocation, copy-on-write, forks, release.

Knows no policy: the scheduler asks what something would cost, decides, then calls a change that cannot fail halfway.
One KV group for now; `block_ids` already answers with one table per group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import InvariantError
from ..request import Request
from .block_pool import BlockPool
from .prefix_hash import PrefixCacheFactory, PrefixHit


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Content of `source` must be copied to `destination` before the step's rows run."""

    source: int
    destination: int


class KVCacheManager:
    """Block tables over one pool."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCacheFactory) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks)
        self._prefix_cache = prefix_cache(self.pool, block_size)
        self._group_tables: dict[str, tuple[tuple[int, ...], ...]] = {}

    # --- questions: nothing changes

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def look_up(self, request: Request) -> PrefixHit:
        return self._prefix_cache.match(request)

    def num_blocks_to_start(self, request: Request, hit: PrefixHit) -> int:
        """Free blocks that starting with this hit uses up: new ones, and cached ones that stop being free."""
        num_new = self.num_blocks_for(request.num_tokens) - len(hit.block_ids)
        return num_new + self.pool.num_free_among(hit.block_ids)

    def num_blocks_to_continue(self, request: Request, num_new_tokens: int) -> int:
        """Free blocks that running this many more tokens uses up, copy-on-write included."""
        end = request.num_computed_tokens + num_new_tokens
        num_new = max(-(-end // self.block_size) - len(request.block_table), 0)
        return num_new + self._writes_to_shared_block(request)

    def block_ids(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """One table per KV group; the same object until a block is added or replaced."""
        tables = self._group_tables.get(request.request_id)
        if tables is None or tables[0] is not request.block_table:
            tables = self._group_tables[request.request_id] = (request.block_table,)
        return tables

    # --- changes

    def start(self, request: Request, hit: PrefixHit) -> None:
        """Blocks for every token known so far; the hit's tokens count as computed."""
        self.pool.touch(hit.block_ids)    # first of all: the blocks just found must not be taken below
        num_new = self.num_blocks_for(request.num_tokens) - len(hit.block_ids)
        request.block_table = hit.block_ids + self.pool.take(num_new)
        request.num_computed_tokens = hit.num_tokens
        self._prefix_cache.start(request, len(hit.block_ids))

    def allocate(self, request: Request, num_new_tokens: int) -> BlockCopy | None:
        """Room for the next tokens. A block that others read too is replaced by a copy before it is written."""
        copy = self._unshare(request) if self._writes_to_shared_block(request) else None
        num_blocks = self.num_blocks_for(request.num_computed_tokens + num_new_tokens)
        if num_blocks > len(request.block_table):
            request.block_table += self.pool.take(num_blocks - len(request.block_table))
        return copy

    def fork(self, parent: Request, child: Request) -> None:
        """The child reads the parent's computed tokens where they lie."""
        shared = parent.block_table[: self.num_blocks_for(parent.num_computed_tokens)]
        self.pool.touch(shared)
        child.block_table = shared
        child.num_computed_tokens = parent.num_computed_tokens
        self._prefix_cache.start(child, parent.num_computed_tokens // self.block_size)

    def register(self, request: Request) -> None:
        """After a step: full blocks whose K/V now exists can be found by others."""
        self._prefix_cache.register(request)

    def distrust(self, request: Request) -> None:
        """Nobody shall find this request's blocks any more: what a failed step read or wrote there may be no number."""
        for block_id in request.block_table:
            self.pool.clear_hash(block_id)

    def free(self, request: Request) -> int:
        """Gives all blocks back; returns how many came free."""
        num_free_before = self.pool.num_free_blocks
        self.pool.release(request.block_table)
        request.block_table = ()
        self._group_tables.pop(request.request_id, None)
        return self.pool.num_free_blocks - num_free_before

    def forget(self, request: Request) -> None:
        """The request has ended: nothing is remembered under its id but the blocks it may still hold."""
        self._prefix_cache.forget(request)

    def copy_done(self, copy: BlockCopy) -> None:
        self.pool.end_transit(copy.source)
        self.pool.end_transit(copy.destination)

    def _writes_to_shared_block(self, request: Request) -> bool:
        # Only the block the next token falls into can be shared: forks share computed tokens, hits are whole blocks.
        position = request.num_computed_tokens // self.block_size
        table = request.block_table
        return position < len(table) and self.pool.num_refs(table[position]) > 1

    def _unshare(self, request: Request) -> BlockCopy:
        position = request.num_computed_tokens // self.block_size
        table = request.block_table
        (fresh,) = self.pool.take(1)
        copy = BlockCopy(source=table[position], destination=fresh)
        self.pool.begin_transit(copy.source)
        self.pool.begin_transit(copy.destination)
        request.block_table = (*table[:position], fresh, *table[position + 1 :])
        self.pool.release((copy.source,))
        return copy

    # --- invariants

    def check(self, requests: Iterable[Request]) -> None:
        """Raises InvariantError unless the pool agrees with these, all the requests that may hold blocks."""
        requests = tuple(requests)
        self.pool.check(request.block_table for request in requests)
        for request in requests:
            if request.num_computed_tokens > len(request.block_table) * self.block_size:
                raise InvariantError(f"{request.request_id} counts tokens as computed that no block of its holds")

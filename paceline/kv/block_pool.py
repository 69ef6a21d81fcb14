"""Block accounting. Owns free order, reference counts, hashes and transit. Knows no requests, no tokens, no tensors.

Invariants after every public call:
  refs[b] == number of block tables containing b
  b is in free  <=>  refs[b] == 0 and b is not in transit
  a free block keeps its hash until it is reused: the free order IS the eviction order
  free + cached + held + in transit == all blocks, where free ones without a hash count as free, with one as cached,
  and only blocks that nobody holds count as in transit
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from ..errors import InvariantError


class BlockPool:
    """Hands out block ids 0 .. num_blocks-1 and takes them back."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvariantError(f"a pool needs a block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._num_moves: dict[int, int] = {}    # block -> transfers under way that read or write it
        self._num_cached_blocks = 0

    # --- reads

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out now, cached ones included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Of the free ones, how many still hold a prefix that can be found by its hash."""
        return self._num_cached_blocks

    @property
    def num_in_transit_blocks(self) -> int:
        """Blocks that nobody holds but a transfer still touches."""
        return sum(1 for block_id in self._num_moves if self._refs[block_id] == 0)

    def num_refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def is_freed_by_release(self, block_id: int) -> bool:
        """Whether it can be given out as soon as one of its holders releases it."""
        return self._refs[block_id] == 1 and block_id not in self._num_moves

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        return sum(1 for block_id in block_ids if block_id in self._free)

    def free_order(self) -> list[int]:
        return list(self._free)

    def find(self, block_hash: bytes) -> int | None:
        """The block holding this content, held or free."""
        return self._block_of.get(block_hash)

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hash_of.get(block_id)

    # --- changes

    def take(self, num_blocks: int) -> tuple[int, ...]:
        """Gives out the blocks that were free the longest; what they cached is forgotten."""
        if num_blocks > len(self._free):
            raise InvariantError(f"{num_blocks} blocks taken, {len(self._free)} free")
        return tuple(self._take_one() for _ in range(num_blocks))

    def _take_one(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            self._num_cached_blocks -= 1
        self._refs[block_id] = 1
        return block_id

    def touch(self, block_ids: Iterable[int]) -> None:
        """One more holder for each. A free block leaves the free order, so nobody can take it away."""
        for block_id in block_ids:
            if self._refs[block_id] == 0 and block_id in self._free:
                del self._free[block_id]
                self._num_cached_blocks -= block_id in self._hash_of
            self._refs[block_id] += 1

    def release(self, block_ids: tuple[int, ...]) -> None:
        """One holder less for each."""
        # Tail first: a prefix is useful without its tail, never the reverse, so the tail must be evicted first.
        for block_id in reversed(block_ids):
            if self._refs[block_id] < 1:
                raise InvariantError(f"block {block_id} released by one who does not hold it")
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                self._put_back(block_id)

    def set_hash(self, block_id: int, block_hash: bytes) -> None:
        """Makes a held, full block findable. The first block with some content keeps the name; a twin stays unnamed."""
        if self._refs[block_id] < 1:
            raise InvariantError(f"block {block_id} named while nobody holds it")
        known = self._hash_of.get(block_id)
        if known is not None and known != block_hash:
            raise InvariantError(f"block {block_id} changed its content while it was cached")
        if known is None and block_hash not in self._block_of:
            self._hash_of[block_id] = block_hash
            self._block_of[block_hash] = block_id

    def clear_hash(self, block_id: int) -> None:
        """A held block is not found any more; who holds it keeps it."""
        if self._refs[block_id] < 1:
            raise InvariantError(f"block {block_id} unnamed while nobody holds it")
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def begin_transit(self, block_id: int) -> None:
        """A transfer now reads or writes this block; it is not reused before end_transit."""
        if block_id in self._free:
            raise InvariantError(f"free block {block_id} put in transit")
        self._num_moves[block_id] = self._num_moves.get(block_id, 0) + 1

    def end_transit(self, block_id: int) -> None:
        num_moves = self._num_moves.pop(block_id, 0)
        if num_moves < 1:
            raise InvariantError(f"block {block_id} was not in transit")
        if num_moves > 1:
            self._num_moves[block_id] = num_moves - 1
        elif self._refs[block_id] == 0:
            self._put_back(block_id)

    def _put_back(self, block_id: int) -> None:
        if block_id not in self._num_moves:
            self._free[block_id] = None
            self._num_cached_blocks += block_id in self._hash_of

    # --- invariants

    def check(self, block_tables: Iterable[tuple[int, ...]]) -> None:
        """Raises InvariantError unless the books agree with these, all the block tables there are."""
        holders = Counter(block_id for table in block_tables for block_id in table)
        for block_id, num_refs in enumerate(self._refs):
            if num_refs != holders[block_id]:
                raise InvariantError(f"block {block_id}: {num_refs} references, {holders[block_id]} block tables")
            if (block_id in self._free) != (num_refs == 0 and block_id not in self._num_moves):
                raise InvariantError(f"block {block_id}: free and held or in transit, or none of these")
        num_held = sum(1 for num_refs in self._refs if num_refs > 0)
        if len(self._free) + num_held + self.num_in_transit_blocks != self.num_blocks:
            raise InvariantError("free + cached + held + in transit is not the number of blocks")
        if {block_hash: block_id for block_id, block_hash in self._hash_of.items()} != self._block_of:
            raise InvariantError("hashes and blocks do not mirror each other")
        if self._num_cached_blocks != self.num_free_among(self._hash_of):
            raise InvariantError("the number of cached blocks drifted")

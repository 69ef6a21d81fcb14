"""Which request holds which blocks. Owns block tables: look-up, allocation, copy-on-write, forks, release.

Knows no policy: the scheduler asks what something would cost, decides, then calls a change that cannot fail halfway.
A request has one table per KV group, all over one pool. A group that sees all takes the blocks of every known token at
the start; one with a window takes them step by step and gives back what has fallen behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import InvariantError
from ..request import Request
from .block_pool import BlockPool
from .groups import FULL_ATTENTION, NULL_BLOCK, KVBudget, KVGroup, real_blocks
from .prefix_hash import PrefixCacheFactory, PrefixHit


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Content of `source` must be copied to `destination` before the step's rows run."""

    source: int
    destination: int
    kv_group: int = 0


class KVCacheManager:
    """Block tables over one pool. max_step_tokens: the most tokens of a request that one step runs; pools without
    windows do not care."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCacheFactory,
        groups: Sequence[KVGroup] = FULL_ATTENTION,
        max_step_tokens: int = 1 << 20,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.groups = tuple(groups)
        self.pool = BlockPool(num_blocks)
        self._budget = KVBudget(num_blocks, block_size, self.groups, max_step_tokens)
        self._prefix_cache = prefix_cache(self.pool, block_size, self.groups)
        self._has_windows = any(group.window is not None for group in self.groups)
        self._forked: set[str] = set()    # ids of parents and children: only these can share a block yet to be filled
        self.max_step_tokens = max_step_tokens if self._has_windows else None
        self._no_blocks: tuple[tuple[int, ...], ...] = ((),) * len(self.groups)

    # --- questions: nothing changes

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def num_in_transit_blocks(self) -> int:
        """Blocks that come free when a transfer under way has ended."""
        return self.pool.num_in_transit_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that sees all."""
        return -(-num_tokens // self.block_size)

    def num_tokens_that_fit(self, limit: int) -> int:
        """The longest request, up to `limit` tokens, that can ever run here."""
        return self._budget.num_tokens_that_fit(limit)

    def look_up(self, request: Request) -> PrefixHit:
        """What starting would find computed: in the cache, or in the blocks a victim kept."""
        if request.block_tables:
            return PrefixHit(request.block_tables, request.num_computed_tokens)
        return self._prefix_cache.match(request)

    def computing_next_block(self, request: Request, hit: PrefixHit) -> str | None:
        """Who is just now computing the full block that follows this hit: the id of a started request."""
        return self._prefix_cache.computing(request, hit.num_tokens)

    def num_blocks_held(self, request: Request) -> int:
        """Shared ones included."""
        if not self._has_windows:
            return sum(map(len, request.block_tables))
        return sum(len(real_blocks(table)) for table in request.block_tables)

    def num_blocks_to_start(self, request: Request, hit: PrefixHit) -> int:
        """Free blocks that starting with this hit uses up: new ones, and cached ones that stop being free.

        For a group with a window, as many as computing the known tokens will hold at once.
        """
        num_needed = 0
        for group, table in zip(self.groups, hit.block_ids or self._no_blocks, strict=True):
            first = group.first_block(hit.num_tokens, self.block_size)
            num_held = len(table) - first
            num_tokens = request.num_tokens - first * self.block_size
            num_most = group.most_blocks(num_tokens, self.block_size, self._budget.max_step_tokens)
            num_needed += max(num_most - num_held, 0) + self.pool.num_free_among(table)
        return num_needed

    def shared_by_fork(self, parent: Request) -> PrefixHit:
        """What a fork of this running request would begin with: not whole blocks only."""
        num_blocks = self.num_blocks_for(parent.num_computed_tokens)
        return PrefixHit(tuple(table[:num_blocks] for table in parent.block_tables), parent.num_computed_tokens)

    def num_blocks_to_continue(self, request: Request, num_new_tokens: int) -> int:
        """Free blocks that running this many more tokens uses up, copy-on-write included."""
        num_blocks = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        num_new = 0
        for table in request.block_tables:
            if len(table) < num_blocks:
                num_new += num_blocks - len(table)
        return num_new + len(self._shared_groups(request)) if self._forked else num_new

    def fits_on(self, request: Request, num_new_tokens: int) -> bool:
        """Whether so many more tokens can run with the blocks that are free."""
        return self.num_blocks_to_continue(request, num_new_tokens) <= self.pool.num_free_blocks

    def num_blocks_to_reach(self, request: Request, hit: PrefixHit, num_tokens: int) -> int:
        """Free blocks that starting with this hit uses up until the request is `num_tokens` long, and its choices too.

        Choices that it is to have are left out where the pool could not hold them all: they start one by one.
        """
        num_needed = 0
        for group, table in zip(self.groups, hit.block_ids or self._no_blocks, strict=True):
            if group.window is None:    # a fork's last block may be one that it must copy before it writes
                num_copies = hit.num_tokens % self.block_size > 0
                num_new = max(self.num_blocks_for(num_tokens) - len(table), 0)
                num_needed += num_new + num_copies + self.pool.num_free_among(table)
            else:    # found blocks save nothing: whoever else reads them may have been counted on to give them back
                num_step_tokens = request.num_tokens - hit.num_tokens
                num_needed += self._most_in_window(group, hit.num_tokens, num_tokens, num_step_tokens)
        num_of_choices = 0 if request.num_output_tokens else self._num_blocks_of_choices(request, num_tokens)
        return num_needed + num_of_choices if num_needed + num_of_choices <= self.num_blocks else num_needed

    def num_blocks_to_grow(self, growing: Iterable[tuple[Request, int]]) -> int:
        """Free blocks that these requests, all that hold blocks, use up at most until each is as long as said."""
        num_needed = 0
        held_in_windows: set[int] = set()
        for request, num_tokens in growing:
            position, num_blocks = request.num_computed_tokens, self.num_blocks_for(num_tokens)
            block = position // self.block_size
            for group, table in zip(self.groups, request.block_tables, strict=True):
                if group.window is None:
                    num_copies = block < len(table) and self.pool.num_refs(table[block]) > 1
                    num_needed += max(num_blocks - len(table), 0) + num_copies
                else:
                    num_needed += self._most_in_window(group, position, num_tokens, request.num_uncomputed_tokens)
                    held_in_windows.update(real_blocks(table))
            if position < request.num_prompt_tokens - 1 and not request.num_output_tokens:
                num_needed += self._num_blocks_of_choices(request, num_tokens)
        return max(num_needed - len(held_in_windows), 0)

    def _most_in_window(self, group: KVGroup, position: int, num_tokens: int, num_step_tokens: int) -> int:
        """Blocks that a request at this position ever holds at once, of whose tokens a step runs that many at most."""
        num_left = max(num_tokens - group.first_block(position, self.block_size) * self.block_size, 0)
        return group.most_blocks(num_left, self.block_size, min(max(num_step_tokens, 1), self._budget.max_step_tokens))

    def _num_blocks_of_choices(self, request: Request, num_tokens: int) -> int:
        """What the choices beside the first take that are born one token before the end of the prompt."""
        num_choices = request.num_choices - 1
        if num_choices < 1:
            return 0
        position, num_needed = request.num_prompt_tokens - 1, 0
        for group in self.groups:
            if group.window is None:    # all but one of those who share the last block copy it; counted for all
                num_shared = position // self.block_size
                num_needed += num_choices * (self.num_blocks_for(num_tokens) - num_shared)
                num_needed += position % self.block_size > 0
            else:
                num_needed += num_choices * self._most_in_window(group, position, num_tokens, 1)
        return num_needed

    # --- changes

    def start(self, request: Request, hit: PrefixHit) -> None:
        """Blocks for every token known so far, behind no window; the hit's tokens count as computed."""
        held = hit.block_ids or self._no_blocks
        if held is not request.block_tables:
            for table in held:    # first of all: the blocks just found must not be taken below
                self.pool.touch(real_blocks(table))
        num_blocks = self.num_blocks_for(request.num_tokens)
        request.block_tables = tuple(
            table + self.pool.take(num_blocks - len(table)) if group.window is None else table
            for group, table in zip(self.groups, held, strict=True)
        )
        request.num_computed_tokens = hit.num_tokens
        self._prefix_cache.start(request, hit.num_tokens // self.block_size)

    def allocate(self, request: Request, num_new_tokens: int) -> tuple[BlockCopy, ...]:
        """Room for the next tokens. A block that others read too is replaced by a copy before it is written."""
        copies: tuple[BlockCopy, ...] = ()
        if self._forked:
            copies = tuple(self._unshare(request, group) for group in self._shared_groups(request))
        num_blocks = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        for table in request.block_tables:
            if len(table) < num_blocks:
                self._lengthen(request, num_blocks)
                break
        return copies

    def _lengthen(self, request: Request, num_blocks: int) -> None:
        request.block_tables = tuple(
            table if len(table) >= num_blocks else table + self.pool.take(num_blocks - len(table))
            for table in request.block_tables
        )

    def fork(self, parent: Request, child: Request) -> None:
        """The child reads the parent's computed tokens where they lie."""
        child.block_tables = self.shared_by_fork(parent).block_ids
        for table in child.block_tables:
            self.pool.touch(real_blocks(table))
        child.num_computed_tokens = parent.num_computed_tokens
        self._forked |= {parent.request_id, child.request_id}
        self._prefix_cache.start(child, parent.num_computed_tokens // self.block_size)

    def computed(self, request: Request) -> None:
        """After a step: full blocks whose K/V now exists can be found by others, and what no later query sees is given
        back."""
        self._prefix_cache.register(request)
        if self._has_windows:
            self._give_back_behind_windows(request)

    def distrust(self, request: Request) -> None:
        """Nobody shall find this request's blocks any more: what a failed step read or wrote there may be no number."""
        for table in request.block_tables:
            for block_id in real_blocks(table):
                self.pool.clear_hash(block_id)

    def free(self, request: Request) -> int:
        """Gives all blocks back; returns how many came free."""
        num_free_before = self.pool.num_free_blocks
        for table in request.block_tables:
            self.pool.release(real_blocks(table))
        request.block_tables = ()
        self._forked.discard(request.request_id)
        self._prefix_cache.stop(request)
        return self.pool.num_free_blocks - num_free_before

    def free_tail(self, request: Request, num_missing: int | None) -> int:
        """Gives back as many of the last blocks as make `num_missing` come free, all where that takes all or None is
        asked; what they held counts as computed no more. Returns how many came free."""
        num_kept = 0 if num_missing is None else self._num_kept(request, num_missing)
        if num_kept == 0:
            request.num_computed_tokens = 0
            return self.free(request)
        num_free_before = self.pool.num_free_blocks
        for table in request.block_tables:
            self.pool.release(real_blocks(table[num_kept:]))
        request.block_tables = tuple(table[:num_kept] for table in request.block_tables)
        request.num_computed_tokens = min(request.num_computed_tokens, num_kept * self.block_size)
        self._prefix_cache.stop(request)
        return self.pool.num_free_blocks - num_free_before

    def _num_kept(self, request: Request, num_missing: int) -> int:
        """The longest table, in blocks, that leaves enough free and whose end no group's window looks back past."""
        num_freed = 0
        for num_kept in range(max(map(len, request.block_tables), default=0) - 1, 0, -1):
            last = [table[num_kept] for table in request.block_tables if len(table) > num_kept]
            num_freed += sum(1 for block_id in real_blocks(last) if self.pool.is_freed_by_release(block_id))
            if num_freed >= num_missing and self._can_go_on_from(request, num_kept):
                return num_kept
        return 0

    def _can_go_on_from(self, request: Request, num_blocks: int) -> bool:
        position = min(request.num_computed_tokens, num_blocks * self.block_size)
        return all(
            NULL_BLOCK not in table[group.first_block(position, self.block_size) : num_blocks]
            for group, table in zip(self.groups, request.block_tables, strict=True)
        )

    def forget(self, request: Request) -> None:
        """The request has ended: nothing is remembered under its id but the blocks it may still hold."""
        self._prefix_cache.forget(request)

    def copy_done(self, copy: BlockCopy) -> None:
        self.pool.end_transit(copy.source)
        self.pool.end_transit(copy.destination)

    def _shared_groups(self, request: Request) -> list[int]:
        """Groups in which the next token is written to a block that others read too."""
        # Only the block the next token falls into can be shared: forks share computed tokens, hits are whole blocks.
        if request.request_id not in self._forked:
            return []
        position = request.num_computed_tokens // self.block_size
        return [
            group
            for group, table in enumerate(request.block_tables)
            if position < len(table) and self.pool.num_refs(table[position]) > 1
        ]

    def _unshare(self, request: Request, group: int) -> BlockCopy:
        position = request.num_computed_tokens // self.block_size
        (fresh,) = self.pool.take(1)
        copy = BlockCopy(source=request.block_tables[group][position], destination=fresh, kv_group=group)
        self.pool.begin_transit(copy.source)
        self.pool.begin_transit(copy.destination)
        tables = list(request.block_tables)
        tables[group] = (*tables[group][:position], fresh, *tables[group][position + 1 :])
        request.block_tables = tuple(tables)
        self.pool.release((copy.source,))
        return copy

    def _give_back_behind_windows(self, request: Request) -> None:
        for index, group in enumerate(self.groups):
            first = group.first_block(request.num_computed_tokens, self.block_size)
            table = request.block_tables[index]
            if first == 0 or table[first - 1] == NULL_BLOCK:
                continue
            self.pool.release(real_blocks(table[:first]))
            tables = list(request.block_tables)
            tables[index] = (NULL_BLOCK,) * first + table[first:]
            request.block_tables = tuple(tables)

    # --- invariants

    def check(self, requests: Iterable[Request]) -> None:
        """Raises InvariantError unless the pool agrees with these, all the requests that may hold blocks."""
        requests = tuple(requests)
        self.pool.check(real_blocks(table) for request in requests for table in request.block_tables)
        for request in requests:
            if request.block_tables or request.num_computed_tokens:
                self._check_tables(request)

    def _check_tables(self, request: Request) -> None:
        for group, table in zip(self.groups, request.block_tables, strict=True):
            if request.num_computed_tokens > len(table) * self.block_size:
                raise InvariantError(f"{request.request_id} counts tokens as computed that no block of its holds")
            first = group.first_block(request.num_computed_tokens, self.block_size)
            if NULL_BLOCK in table[first:] or real_blocks(table[:first]):
                raise InvariantError(f"{request.request_id} holds blocks behind its window, or lacks one within")

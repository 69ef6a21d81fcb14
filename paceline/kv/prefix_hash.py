"""Which full blocks of a request are already computed. Owns the hash chains; the pool owns which block has which hash.

A block's hash covers its parent's hash, its own tokens and the request's extras (salt, adapter), so equal hashes mean
equal context from position 0 on. sha256: a collision would serve another prompt's keys and values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

from ..errors import InvariantError
from ..request import Request
from .block_pool import BlockPool
from .groups import NULL_BLOCK, KVGroup

ROOT = b"paceline"    # the parent of every first block


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest reusable prefix: one table of blocks per KV group, and how many tokens they cover."""

    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int


MISS = PrefixHit((), 0)


class PrefixCache(Protocol):
    """Finds and registers full blocks. `match` only reads the pool."""

    def match(self, request: Request) -> PrefixHit: ...

    def start(self, request: Request, num_known_blocks: int) -> None:
        """The request now holds blocks, of which the first `num_known_blocks` need no registering."""

    def computing(self, request: Request, num_tokens: int) -> str | None:
        """Who computes the full block of this request's prompt that begins at `num_tokens`: the id of a request that
        started and has not stopped."""

    def register(self, request: Request) -> None:
        """Makes blocks findable whose K/V has become complete."""

    def stop(self, request: Request) -> None:
        """The request computes no more, or not until it starts again."""

    def forget(self, request: Request) -> None:
        """The request has ended; its blocks stay findable until reused."""


def block_hash(parent: bytes, token_ids: tuple[int, ...], extras: tuple[str, ...]) -> bytes:
    """Identity of a block's content. Every part has a fixed or a stated length, so no two inputs read the same."""
    digest = sha256(parent)
    digest.update(struct.pack(f"<I{len(token_ids)}q", len(token_ids), *token_ids))
    for extra in extras:
        encoded = extra.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<I", len(encoded)))
        digest.update(encoded)
    return digest.digest()


def group_key(content: bytes, group: int) -> bytes:
    """What the pool knows a block by: groups hold other layers of the same tokens."""
    return content if group == 0 else content + struct.pack("<I", group)


@dataclass(slots=True)
class _Chain:
    hashes: list[bytes] = field(default_factory=list)    # of the first full blocks, as far as anyone asked
    num_registered: int = 0                              # blocks of the current table that need no registering


class HashPrefixCache:
    """Whole blocks, found by hash."""

    def __init__(self, pool: BlockPool, block_size: int, groups: Sequence[KVGroup]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._groups = groups
        self._chains: dict[str, _Chain] = {}
        self._computing: dict[bytes, str] = {}    # full blocks of prompts that are not registered yet -> who runs them

    def match(self, request: Request) -> PrefixHit:
        """The longest prefix of which every group still has the blocks that the tokens after it read.

        One token short of the end at most: something must run to give logits.
        """
        num_blocks = (request.num_tokens - 1) // self._block_size
        hashes = self._hashes(request, num_blocks)
        for index, group in enumerate(self._groups):
            if group.window is None:
                num_blocks = self._first_hole(hashes, index, num_blocks)
        while num_blocks and (holes := self._holes(hashes, num_blocks)):
            num_blocks = min(holes)    # what reaches past a hole looks back on it, until its window begins behind it
        return self._hit(hashes, num_blocks) if num_blocks else MISS

    def _first_hole(self, hashes: Sequence[bytes], group: int, end: int) -> int:
        for position in range(end):
            if self._pool.find(group_key(hashes[position], group)) is None:
                return position
        return end

    def _holes(self, hashes: Sequence[bytes], num_blocks: int) -> list[int]:
        """Per group with a window, the last block missing of those that are seen from behind num_blocks blocks."""
        holes: list[int] = []
        for index, group in enumerate(self._groups):
            if group.window is None:
                continue
            first = group.first_block(num_blocks * self._block_size, self._block_size)
            for position in range(num_blocks - 1, first - 1, -1):
                if self._pool.find(group_key(hashes[position], index)) is None:
                    holes.append(position)
                    break
        return holes

    def _hit(self, hashes: Sequence[bytes], num_blocks: int) -> PrefixHit:
        num_tokens = num_blocks * self._block_size
        tables: list[tuple[int, ...]] = []
        for index, group in enumerate(self._groups):
            first = group.first_block(num_tokens, self._block_size)
            block_ids = [self._pool.find(group_key(hashes[i], index)) for i in range(first, num_blocks)]
            tables.append((NULL_BLOCK,) * first + tuple(block_id for block_id in block_ids if block_id is not None))
        return PrefixHit(tuple(tables), num_tokens)

    def start(self, request: Request, num_known_blocks: int) -> None:
        self._chain(request).num_registered = num_known_blocks
        for content in self._hashes(request, self._num_prompt_blocks(request))[num_known_blocks:]:
            self._computing.setdefault(content, request.request_id)

    def computing(self, request: Request, num_tokens: int) -> str | None:
        position = num_tokens // self._block_size
        num_blocks = (request.num_tokens - 1) // self._block_size
        return self._computing.get(self._hashes(request, num_blocks)[position]) if position < num_blocks else None

    def stop(self, request: Request) -> None:
        chain = self._chains.get(request.request_id)
        if chain is not None:
            self._computed(request, chain.num_registered, self._num_prompt_blocks(request))

    def _num_prompt_blocks(self, request: Request) -> int:
        return request.num_prompt_tokens // self._block_size

    def _computed(self, request: Request, start: int, end: int) -> None:
        """Nobody need wait for these blocks of the request any longer."""
        for content in self._chain(request).hashes[start:end]:
            if self._computing.get(content) == request.request_id:
                del self._computing[content]

    def register(self, request: Request) -> None:
        chain = self._chains.get(request.request_id)
        if chain is None:
            raise InvariantError(f"{request.request_id} registers blocks but never started")
        num_full = request.num_computed_tokens // self._block_size
        if chain.num_registered >= num_full:
            return
        hashes = self._hashes(request, num_full)
        for position in range(chain.num_registered, num_full):
            for group, table in enumerate(request.block_tables):
                if table[position] != NULL_BLOCK:
                    self._pool.set_hash(table[position], group_key(hashes[position], group))
        self._computed(request, chain.num_registered, num_full)
        chain.num_registered = num_full

    def forget(self, request: Request) -> None:
        self.stop(request)
        self._chains.pop(request.request_id, None)

    def _chain(self, request: Request) -> _Chain:
        return self._chains.setdefault(request.request_id, _Chain())

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The chain's first hashes, at least `num_blocks` of them. Tokens never change, so the chain only grows."""
        hashes = self._chain(request).hashes
        for position in range(len(hashes), num_blocks):
            start = position * self._block_size
            tokens = request.token_ids(start, start + self._block_size)
            hashes.append(block_hash(hashes[-1] if hashes else ROOT, tokens, request.cache_extras))
        return hashes


class NoPrefixCache:
    """Nothing is reused."""

    def __init__(self, pool: BlockPool, block_size: int, groups: Sequence[KVGroup]) -> None:
        pass

    def match(self, request: Request) -> PrefixHit:
        return MISS

    def start(self, request: Request, num_known_blocks: int) -> None:
        pass

    def computing(self, request: Request, num_tokens: int) -> str | None:
        return None

    def register(self, request: Request) -> None:
        pass

    def stop(self, request: Request) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


PrefixCacheFactory = Callable[[BlockPool, int, Sequence[KVGroup]], PrefixCache]    # (pool, block_size, groups)

PREFIX_CACHES: Mapping[str, PrefixCacheFactory] = {"none": NoPrefixCache, "hash": HashPrefixCache}

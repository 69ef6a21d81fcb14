"""Which full blocks of a request are already computed. Owns the hash chains; the pool owns which block has which hash.

A block's hash covers its parent's hash, its own tokens and the request's extras (salt, adapter), so equal hashes mean
equal context from position 0 on. sha256: a collision would serve another prompt's keys and values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

from ..errors import InvariantError
from ..request import Request
from .block_pool import BlockPool

ROOT = b"paceline"    # the parent of every first block


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest reusable prefix: blocks in order and how many tokens they cover."""

    block_ids: tuple[int, ...]
    num_tokens: int


MISS = PrefixHit((), 0)


class PrefixCache(Protocol):
    """Finds and registers full blocks. `match` only reads the pool."""

    def match(self, request: Request) -> PrefixHit: ...

    def start(self, request: Request, num_known_blocks: int) -> None:
        """The request now holds blocks, of which the first `num_known_blocks` need no registering."""

    def register(self, request: Request) -> None:
        """Makes blocks findable whose K/V has become complete."""

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


@dataclass(slots=True)
class _Chain:
    hashes: list[bytes] = field(default_factory=list)    # of the first full blocks, as far as anyone asked
    num_registered: int = 0                              # blocks of the current table that need no registering


class HashPrefixCache:
    """Whole blocks, found by hash."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._chains: dict[str, _Chain] = {}

    def match(self, request: Request) -> PrefixHit:
        """Stops at the first miss, and one token short of the end: something must run to give logits."""
        num_blocks = (request.num_tokens - 1) // self._block_size
        hashes = self._hashes(request, num_blocks)
        block_ids: list[int] = []
        for position in range(num_blocks):
            block_id = self._pool.find(hashes[position])
            if block_id is None:
                break
            block_ids.append(block_id)
        return PrefixHit(tuple(block_ids), len(block_ids) * self._block_size) if block_ids else MISS

    def start(self, request: Request, num_known_blocks: int) -> None:
        self._chain(request).num_registered = num_known_blocks

    def register(self, request: Request) -> None:
        chain = self._chains.get(request.request_id)
        if chain is None:
            raise InvariantError(f"{request.request_id} registers blocks but never started")
        num_full = request.num_computed_tokens // self._block_size
        if chain.num_registered >= num_full:
            return
        hashes = self._hashes(request, num_full)
        for position in range(chain.num_registered, num_full):
            self._pool.set_hash(request.block_table[position], hashes[position])
        chain.num_registered = num_full

    def forget(self, request: Request) -> None:
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

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        pass

    def match(self, request: Request) -> PrefixHit:
        return MISS

    def start(self, request: Request, num_known_blocks: int) -> None:
        pass

    def register(self, request: Request) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


PrefixCacheFactory = Callable[[BlockPool, int], PrefixCache]    # (pool, block_size)

PREFIX_CACHES: Mapping[str, PrefixCacheFactory] = {"none": NoPrefixCache, "hash": HashPrefixCache}

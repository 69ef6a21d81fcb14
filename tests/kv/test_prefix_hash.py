"""Which blocks count as already computed, and which must not."""

from __future__ import annotations

import pytest

from paceline.kv.manager import KVCacheManager
from paceline.kv.prefix_hash import MISS, PREFIX_CACHES, ROOT, block_hash
from paceline.request import Request

from ..fakes import make_request

BLOCK = 4


def compute(kv: KVCacheManager, request: Request) -> tuple[int, ...]:
    """Runs the request's known tokens and frees it, as a short life would. Returns the blocks it used."""
    kv.start(request, kv.look_up(request))
    table = request.block_tables[0]
    request.num_computed_tokens = request.num_tokens
    kv.computed(request)
    kv.free(request)
    return table


def roomy(num_blocks: int = 16) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, PREFIX_CACHES["hash"])


def test_the_hash_covers_parent_tokens_and_extras() -> None:
    one = block_hash(ROOT, (1, 2, 3, 4), ())
    others = [
        block_hash(one, (1, 2, 3, 4), ()),
        block_hash(ROOT, (1, 2, 3, 5), ()),
        block_hash(ROOT, (4, 3, 2, 1), ()),
        block_hash(ROOT, (1, 2, 3, 4), ("a",)),
        block_hash(ROOT, (1, 2, 3, 4), ("a", "b")),
        block_hash(ROOT, (1, 2, 3, 4), ("ab",)),
        block_hash(ROOT, (1, 2, 3, 4), ("b", "a")),
    ]
    assert len({one, *others}) == 1 + len(others)
    assert len(one) == 32
    assert one == block_hash(ROOT, (1, 2, 3, 4), ())


def test_tokens_equal_in_their_low_bytes_do_not_collide() -> None:
    assert block_hash(ROOT, (1,), ()) != block_hash(ROOT, (1 + (1 << 32),), ())
    assert block_hash(ROOT, (1, 0), ()) != block_hash(ROOT, (1,), ())


def test_a_repeated_prompt_hits_whole_blocks() -> None:
    kv = roomy()
    table = compute(kv, make_request("a", 11))
    hit = kv.look_up(make_request("b", 11))
    assert hit.block_ids == (table[:2],)
    assert hit.num_tokens == 8


@pytest.mark.parametrize("num_prompt_tokens", [BLOCK, 2 * BLOCK, 3 * BLOCK])
def test_a_full_hit_leaves_the_last_token_to_compute(num_prompt_tokens: int) -> None:
    kv = roomy()
    compute(kv, make_request("a", num_prompt_tokens))
    hit = kv.look_up(make_request("b", num_prompt_tokens))
    assert hit.num_tokens == num_prompt_tokens - BLOCK


def test_a_hole_in_the_chain_ends_the_hit() -> None:
    kv = roomy(num_blocks=4)
    table = compute(kv, make_request("a", 13))
    kv.pool.touch((table[0], table[2]))      # all but the second block are safe
    kv.pool.take(2)                          # the second is evicted
    assert kv.look_up(make_request("b", 13)).block_ids == (table[:1],)


def test_salts_and_adapters_share_nothing() -> None:
    kv = roomy()
    compute(kv, make_request("a", 12, cache_extras=("salt a",)))
    assert kv.look_up(make_request("b", 12, cache_extras=("salt b",))) is MISS
    assert kv.look_up(make_request("c", 12)) is MISS
    assert kv.look_up(make_request("d", 12, cache_extras=("salt a",))).num_tokens == 8


def test_equal_tokens_after_another_prefix_do_not_hit() -> None:
    kv = roomy()
    compute(kv, make_request("a", (1, 2, 3, 4, 9, 9, 9, 9, 5)))
    assert kv.look_up(make_request("b", (5, 6, 7, 8, 9, 9, 9, 9, 5))) is MISS


def test_blocks_of_generated_tokens_are_found_too() -> None:
    kv = roomy()
    talker = make_request("a", 3)
    talker.output_token_ids = [31, 32, 33, 34, 35]
    compute(kv, talker)
    follow_up = make_request("b", (*talker.prompt_token_ids, 31, 32, 33, 34, 35, 36))
    assert kv.look_up(follow_up).num_tokens == 8


def test_a_block_is_found_only_once_its_values_exist() -> None:
    kv = roomy()
    slow = make_request("a", 12)
    kv.start(slow, kv.look_up(slow))
    assert kv.look_up(make_request("b", 12)) is MISS
    slow.num_computed_tokens = 7
    kv.computed(slow)
    assert kv.look_up(make_request("b", 12)).num_tokens == 4


def test_none_reuses_nothing() -> None:
    kv = KVCacheManager(16, BLOCK, PREFIX_CACHES["none"])
    compute(kv, make_request("a", 12))
    assert kv.look_up(make_request("b", 12)) is MISS
    assert kv.pool.num_cached_blocks == 0

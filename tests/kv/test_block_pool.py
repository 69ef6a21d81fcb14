"""The pool's books: who holds what, what is evicted first, what must not be reused yet."""

from __future__ import annotations

import pytest

from paceline.errors import InvariantError
from paceline.kv.block_pool import BlockPool


def test_blocks_of_a_finished_request_are_evicted_tail_first() -> None:
    pool = BlockPool(num_blocks=4)
    first = pool.take(3)
    pool.release(first)
    assert pool.free_order() == [3, first[2], first[1], first[0]]


def test_a_free_block_keeps_its_hash_until_it_is_reused() -> None:
    pool = BlockPool(num_blocks=2)
    (block_id,) = pool.take(1)
    pool.set_hash(block_id, b"content")
    pool.release((block_id,))
    assert pool.find(b"content") == block_id
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (2, 1)
    pool.take(2)
    assert pool.find(b"content") is None
    assert pool.num_cached_blocks == 0
    pool.check([(0, 1)])


def test_a_touched_block_leaves_the_free_order() -> None:
    pool = BlockPool(num_blocks=2)
    (block_id,) = pool.take(1)
    pool.set_hash(block_id, b"content")
    pool.release((block_id,))
    pool.touch((block_id,))
    assert block_id not in pool.take(1)
    with pytest.raises(InvariantError):
        pool.take(1)
    assert pool.find(b"content") == block_id


def test_a_shared_block_comes_free_with_its_last_holder() -> None:
    pool = BlockPool(num_blocks=1)
    table = pool.take(1)
    pool.touch(table)
    pool.release(table)
    assert pool.num_free_blocks == 0
    pool.release(table)
    assert pool.num_free_blocks == 1


def test_a_block_in_transit_is_never_reused() -> None:
    pool = BlockPool(num_blocks=2)
    table = pool.take(1)
    pool.begin_transit(table[0])
    pool.begin_transit(table[0])
    pool.release(table)
    assert (pool.num_free_blocks, pool.num_in_transit_blocks) == (1, 1)
    pool.check([])
    pool.end_transit(table[0])
    assert pool.num_free_blocks == 1
    pool.end_transit(table[0])
    assert pool.free_order() == [1, table[0]]
    pool.check([])


def test_a_twin_of_a_known_block_stays_unnamed() -> None:
    pool = BlockPool(num_blocks=2)
    first, second = pool.take(2)
    pool.set_hash(first, b"content")
    pool.set_hash(second, b"content")
    assert pool.find(b"content") == first
    assert pool.hash_of(second) is None
    pool.check([(first, second)])


@pytest.mark.parametrize("misdeed", [
    lambda pool: pool.take(3),                                # more than there are
    lambda pool: pool.release((1,)),                          # not held
    lambda pool: pool.set_hash(1, b"x"),                      # named while free
    lambda pool: pool.begin_transit(1),                       # moved while free
    lambda pool: pool.end_transit(0),                         # never began
    lambda pool: (pool.set_hash(0, b"x"), pool.set_hash(0, b"y")),
    lambda pool: pool.check([]),                              # block 0 is held by nobody we know
    lambda pool: pool.check([(0,), (0,)]),                    # held twice, counted once
])
def test_misuse_stops_loudly(misdeed) -> None:
    pool = BlockPool(num_blocks=2)
    assert pool.take(1) == (0,)
    with pytest.raises(InvariantError):
        misdeed(pool)

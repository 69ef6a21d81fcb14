"""Block tables through start, growth, forks and release."""

from __future__ import annotations

import pytest

from paceline.errors import InvariantError
from paceline.kv.manager import BlockCopy, KVCacheManager
from paceline.kv.prefix_hash import PREFIX_CACHES
from paceline.request import Request

from ..fakes import make_request


def started(kv: KVCacheManager, request: Request, num_computed_tokens: int | None = None) -> Request:
    kv.start(request, kv.look_up(request))
    if num_computed_tokens is not None:
        request.num_computed_tokens = num_computed_tokens
        kv.computed(request)
    return request


def make_kv(num_blocks: int) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, PREFIX_CACHES["hash"])


def test_a_hit_is_touched_before_anything_else_is_taken() -> None:
    kv = make_kv(num_blocks=4)
    first = started(kv, make_request("a", 8), num_computed_tokens=8)
    cached = first.block_tables[0]
    kv.free(first)
    other = started(kv, make_request("x", 8, salt=1))       # the two never-used blocks are gone
    again = make_request("b", 12)
    kv.free(other)
    hit = kv.look_up(again)
    assert hit.block_ids == (cached,)
    kv.start(again, hit)
    assert again.block_tables[0][:2] == cached
    assert again.block_tables[0][2] not in cached
    kv.check([again])


def test_starting_costs_new_blocks_and_cached_ones_that_stop_being_free() -> None:
    kv = make_kv(num_blocks=6)
    first = started(kv, make_request("a", 9), num_computed_tokens=9)
    again = make_request("b", 9)
    hit = kv.look_up(again)
    assert kv.num_blocks_to_start(again, hit) == 1          # two are shared with a, who holds them
    kv.free(first)
    assert kv.num_blocks_to_start(again, hit) == 3          # the same two now come out of the free ones


def test_the_table_is_one_object_until_a_block_is_added() -> None:
    kv = make_kv(num_blocks=4)
    request = started(kv, make_request("a", 3), num_computed_tokens=3)
    before = request.block_tables
    request.output_token_ids.append(9)
    kv.allocate(request, 1)
    assert request.block_tables is before
    request.num_computed_tokens = 4
    kv.allocate(request, 1)
    after = request.block_tables
    assert after is not before
    assert after[0][:1] == before[0]
    assert request.block_tables is after


def test_forks_share_and_part_when_they_write() -> None:
    kv = make_kv(num_blocks=8)
    parent, child = started(kv, make_request("a", 6), num_computed_tokens=5), make_request("a:1", 6)
    kv.fork(parent, child)
    assert child.block_tables == parent.block_tables
    assert child.num_computed_tokens == 5
    assert kv.num_blocks_to_continue(parent, 1) == 1
    shared = parent.block_tables[0][1]
    (copy,) = kv.allocate(parent, 1)
    assert copy == BlockCopy(source=shared, destination=parent.block_tables[0][1])
    assert kv.num_blocks_to_continue(child, 1) == 0         # alone on the old block now: it writes in place
    assert kv.allocate(child, 1) == ()
    assert child.block_tables[0][0] == parent.block_tables[0][0]
    kv.check([parent, child])


def test_a_fork_takes_no_block_that_holds_nothing_yet() -> None:
    kv = make_kv(num_blocks=8)
    parent, child = started(kv, make_request("a", 5), num_computed_tokens=4), make_request("a:1", 5)
    kv.fork(parent, child)
    assert child.block_tables[0] == parent.block_tables[0][:1]
    assert kv.allocate(parent, 1) == ()
    assert kv.allocate(child, 1) == ()
    assert child.block_tables[0][1] != parent.block_tables[0][1]


def test_both_ends_of_a_copy_stay_out_of_reach_until_it_is_done() -> None:
    kv = make_kv(num_blocks=4)
    parent, child = started(kv, make_request("a", 3), num_computed_tokens=2), make_request("a:1", 3)
    kv.fork(parent, child)
    (copy,) = kv.allocate(parent, 1)
    assert (kv.free(parent), kv.free(child)) == (0, 0)
    assert kv.num_free_blocks == 2
    kv.check([])
    kv.copy_done(copy)
    assert kv.num_free_blocks == 4


def test_a_request_counting_tokens_it_has_no_blocks_for_is_a_bug() -> None:
    kv = make_kv(num_blocks=4)
    request = started(kv, make_request("a", 3))
    request.num_computed_tokens = 5
    with pytest.raises(InvariantError):
        kv.check([request])


def test_the_running_request_that_started_twice_shares_its_own_twin_blocks() -> None:
    """Two equal prompts computed side by side: the second registers nothing, and both leave a clean pool."""
    kv = make_kv(num_blocks=8)
    one, two = started(kv, make_request("a", 9)), started(kv, make_request("b", 9))
    for request in (one, two):
        request.num_computed_tokens = 9
        kv.computed(request)
    kv.check([one, two])
    kv.free(one)
    assert kv.look_up(make_request("c", 9)).num_tokens == 8
    kv.free(two)
    kv.check([])
    assert kv.num_free_blocks == 8

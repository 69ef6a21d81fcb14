"""Groups of layers with windows: what is held, what is given back, what is found again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.kv.groups import FULL_ATTENTION, NULL_BLOCK, KVBudget, KVGroup
from paceline.kv.manager import KVCacheManager
from paceline.kv.prefix_hash import MISS, PREFIX_CACHES
from paceline.request import Request

from ..fakes import Setup, Stage, make_request, solo

BLOCK = 4
BOTH = (KVGroup(), KVGroup(window=6))


def make_kv(num_blocks: int, groups: tuple[KVGroup, ...] = BOTH, max_step_tokens: int = 8) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, PREFIX_CACHES["hash"], groups, max_step_tokens)


def run(kv: KVCacheManager, request: Request, chunk: int = 8) -> None:
    """Computes every known token, `chunk` a step."""
    kv.start(request, kv.look_up(request))
    while request.num_uncomputed_tokens:
        num_new_tokens = min(chunk, request.num_uncomputed_tokens)
        kv.allocate(request, num_new_tokens)
        request.num_computed_tokens += num_new_tokens
        kv.computed(request)
        kv.check([request])


@given(window=st.integers(1, 40), start=st.integers(0, 60), num_new=st.integers(1, 12),
       block_size=st.sampled_from([2, 4]))
def test_no_step_ever_holds_more_than_the_group_says(window: int, start: int, num_new: int, block_size: int) -> None:
    group = KVGroup(window)
    end = -(-(start + num_new) // block_size)
    num_held = end - group.first_block(start, block_size)
    assert num_held <= group.most_blocks(start + num_new, block_size, max_step_tokens=num_new)


@given(num_blocks=st.integers(1, 40), limit=st.integers(1, 200), windows=st.lists(st.integers(1, 30), max_size=3),
       has_full=st.booleans())
def test_the_longest_request_that_fits_is_the_longest(num_blocks: int, limit: int, windows: list[int],
                                                      has_full: bool) -> None:
    groups = (*(FULL_ATTENTION if has_full or not windows else ()), *map(KVGroup, windows))
    budget = KVBudget(num_blocks, BLOCK, groups, max_step_tokens=8)
    longest = budget.num_tokens_that_fit(limit)
    assert longest <= limit
    assert budget.blocks_needed(longest) <= num_blocks
    assert longest == limit or budget.blocks_needed(longest + 1) > num_blocks


def test_blocks_behind_the_window_are_given_back_as_the_request_moves_on() -> None:
    kv, request = make_kv(num_blocks=20), make_request("a", 22)
    run(kv, request)
    full, window = request.block_tables
    assert len(full) == len(window) == 6
    assert NULL_BLOCK not in full
    assert window[:4] == (NULL_BLOCK,) * 4    # the token at 22 sees from 17 on, which lies in block 4
    assert NULL_BLOCK not in window[4:]
    assert kv.num_free_blocks == 20 - 6 - 2


def test_a_window_alone_runs_a_request_longer_than_the_pool() -> None:
    kv = make_kv(num_blocks=5, groups=(KVGroup(window=6),))
    assert kv.num_tokens_that_fit(10_000) == 10_000
    run(kv, make_request("a", 200))
    assert make_kv(num_blocks=3, groups=(KVGroup(window=6),)).num_tokens_that_fit(10_000) == 12


def test_a_hit_needs_of_a_window_only_what_can_still_be_seen() -> None:
    kv, first = make_kv(num_blocks=12), make_request("a", 21)
    run(kv, first)
    kv.free(first)
    again = make_request("b", 21)
    hit = kv.look_up(again)
    assert hit.num_tokens == 20
    assert hit.block_ids[1][:3] == (NULL_BLOCK,) * 3
    run(kv, again)


def test_a_hole_in_the_window_shortens_the_hit_to_where_nothing_looks_back_on_it() -> None:
    kv, first = make_kv(num_blocks=16), make_request("a", 25)
    run(kv, first)
    forgotten = first.block_tables[1][5]
    kv.free(first)
    kv.pool.touch([block for block in range(16) if block != forgotten and kv.pool.hash_of(block) is not None])
    kv.pool.take(kv.num_free_blocks)    # block 5 of the window is forgotten, everything else is safe
    hit = kv.look_up(make_request("b", 25))
    assert hit.num_tokens == 5 * BLOCK


def test_without_any_block_of_the_window_there_is_no_hit() -> None:
    kv, first = make_kv(num_blocks=12), make_request("a", 13)
    run(kv, first)
    window = {block_id for block_id in range(12) if len(kv.pool.hash_of(block_id) or b"") > 32}
    kv.free(first)
    kv.pool.touch([block_id for block_id in range(12) if block_id not in window])
    kv.pool.take(kv.num_free_blocks)
    assert kv.look_up(make_request("b", 13)) is MISS


def test_forks_share_what_the_window_still_shows_and_part_in_every_group() -> None:
    kv = make_kv(num_blocks=20)
    parent, child = make_request("a", 18), make_request("a:1", 18)
    run(kv, parent)
    kv.fork(parent, child)
    assert child.block_tables == parent.block_tables
    assert kv.num_blocks_to_continue(parent, 1) == 2
    copies = kv.allocate(parent, 1)
    assert [copy.kv_group for copy in copies] == [0, 1]
    kv.check([parent, child])
    for copy in copies:
        kv.copy_done(copy)
    assert kv.allocate(child, 1) == ()


@pytest.mark.parametrize("groups", [(KVGroup(window=6),), BOTH])
def test_a_long_request_in_a_small_pool_says_what_it_says_alone(groups: tuple[KVGroup, ...]) -> None:
    setup = Setup(num_blocks=40, max_num_batched_tokens=8, groups=groups, max_model_len=120)
    stage = Stage(setup)
    long, short = make_request("long", 70, 20), make_request("short", 9, 30, salt=1)
    stage.add(long, short)
    assert stage.run().tokens == {"long": solo(long, setup), "short": solo(short, setup)}


@pytest.mark.parametrize("groups", [(KVGroup(window=4),), (KVGroup(), KVGroup(window=4))])
def test_an_exact_repeat_behind_a_window_gives_equal_tokens(groups: tuple[KVGroup, ...]) -> None:
    setup = Setup(block_size=2, max_num_batched_tokens=4, groups=groups)
    stage = Stage(setup)
    first, again = make_request("first", 9, 6), make_request("again", 9, 6)
    for request in (first, again):
        stage.add(request)
        stage.run()
    assert again.num_cached_tokens == 8    # two blocks of two cover the three tokens before the ninth
    assert stage.tokens["first"] == stage.tokens["again"] == solo(again, setup)

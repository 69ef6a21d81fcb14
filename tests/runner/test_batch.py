"""Plans become arrays."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from paceline.errors import InvariantError
from paceline.kv.groups import NULL_BLOCK
from paceline.request import SamplingParams
from paceline.runner.batch import BatchBuilder
from paceline.sched.plan import (
    InputToken,
    LastSampled,
    SamplingRef,
    ScheduledRequest,
    SchedulerOutput,
    TokenHistory,
    Transfer,
    TransferKind,
)

from .helpers import GREEDY, plan, row

MIXED = plan(
    row("decode", 20, [7], (3, 1)),
    row("chunk", 16, [4, 5, 6], (2, 8, 9), params=None),
    row("prompt", 0, [1, 2], (5,), params=SamplingParams(max_tokens=1, temperature=0.5, top_k=9, top_p=0.75, seed=-1)),
    copies=[(4, 5), (5, 6)],
)


def test_tokens_positions_rows_and_wanted() -> None:
    batch = BatchBuilder().build(MIXED, {})
    assert batch.token_ids.tolist() == [7, 4, 5, 6, 1, 2]
    assert batch.positions.tolist() == [20, 16, 17, 18, 0, 1]
    assert batch.row_starts.tolist() == [0, 1, 4, 6]
    assert batch.wanted.tolist() == [0, 5]
    assert batch.copies.tolist() == [[4, 5], [5, 6]]
    tables = [table[:n].tolist() for table, n in zip(batch.block_tables[0], (2, 3, 1), strict=True)]
    assert tables == [[3, 1], [2, 8, 9], [5]]
    assert all(a.flags.c_contiguous for a in (batch.token_ids, batch.block_tables, batch.copies))


def test_sampling_columns() -> None:
    sampling = BatchBuilder().build(MIXED, {}).sampling
    assert sampling.temperature.tolist() == [0.0, 0.5]
    assert sampling.top_k.tolist() == [0, 9]
    assert sampling.top_p.tolist() == [1.0, 0.75]
    assert sampling.seed.tolist() == [0, (1 << 64) - 1]
    assert sampling.position.tolist() == [21, 2]
    assert sampling.wants_logprob.tolist() == [1, 0]
    dtypes = [np.float32, np.int32, np.float32, np.uint64, np.uint32, np.uint32, np.uint64, np.uint8]
    fields = ("temperature", "top_k", "top_p", "seed", "prompt_index", "choice_index", "position", "wants_logprob")
    assert [getattr(sampling, name).dtype for name in fields] == dtypes


def test_several_wanted_positions_of_one_row() -> None:
    batch = BatchBuilder().build(plan(row("a", 0, [9], (0,)), row("b", 4, [1, 2, 3], (1,), wants=(0, 2))), {})
    assert batch.wanted.tolist() == [0, 1, 3]
    assert batch.sampling.position.tolist() == [1, 5, 7]


def test_nothing_wanted_and_nothing_at_all() -> None:
    chunk = BatchBuilder().build(plan(row("a", 0, [1, 2], (0,), params=None)), {})
    assert len(chunk.wanted) == 0 and len(chunk.sampling.seed) == 0
    empty = BatchBuilder().build(plan(copies=[(1, 2)]), {})
    assert len(empty.token_ids) == 0 and empty.row_starts.tolist() == [0] and empty.copies.shape == (1, 2)


def test_the_last_sampled_token_is_filled_in() -> None:
    rows = row("a", 5, [LastSampled.TOKEN], (0,)), row("b", 3, [1, LastSampled.TOKEN], (1,))
    batch = BatchBuilder().build(plan(*rows), {"a": 42, "b": 43})
    assert batch.token_ids.tolist() == [42, 1, 43]
    with pytest.raises(InvariantError, match="a continues"):
        BatchBuilder().build(plan(row("a", 5, [LastSampled.TOKEN], (0,))), {"b": 1})
    failed = BatchBuilder().build(plan(row("a", 5, [LastSampled.TOKEN], (0,))), {"a": -1})
    assert failed.token_ids.tolist() == [0]    # some token: the executor drops what comes of it


def test_a_table_is_cached_by_the_identity_of_its_tuple() -> None:
    builder, first = BatchBuilder(), row("a", 0, [1], (3, 1))
    builder.build(plan(first), {})
    kept = builder._tables["a"][1]
    builder.build(plan(replace(first, num_computed_tokens=1)), {})
    assert builder._tables["a"][1] is kept
    grown = builder.build(plan(row("a", 2, [1], (3, 1, 7))), {})
    assert grown.block_tables.tolist() == [[[3, 1, 7]]]
    builder.build(plan(row("b", 0, [1], (0,))), {})
    assert list(builder._tables) == ["b"]    # nothing is kept for requests that left


def test_every_kv_group_has_its_tables_and_short_ones_are_filled_up() -> None:
    long = ScheduledRequest("a", 40, (1,), ((4, 5, 6), (NULL_BLOCK, NULL_BLOCK, 9)), (), None)
    short = ScheduledRequest("b", 0, (1,), ((7, 8), (2,)), (), None)
    tables = BatchBuilder(num_groups=2).build(plan(long, short), {}).block_tables
    assert tables[0].tolist() == [[4, 5, 6], [7, 8, 0]]
    assert tables[1].tolist() == [[NULL_BLOCK, NULL_BLOCK, 9], [2, NULL_BLOCK, 0]]


def test_what_this_executor_cannot_do_is_refused() -> None:
    swap = SchedulerOutput(0, (), (Transfer(0, TransferKind.SWAP_OUT, 0, 1, 2),))
    with pytest.raises(InvariantError, match="SWAP_OUT"):
        BatchBuilder().build(swap, {})
    unsampled = ScheduledRequest("a", 0, (1,), ((0,),), (0,), None)
    with pytest.raises(InvariantError, match="a wants logits"):
        BatchBuilder().build(SchedulerOutput(0, (unsampled,)), {})


def test_thirty_two_rows_of_decode_are_quick() -> None:
    builder, params = BatchBuilder(), SamplingRef(GREEDY, 0, 0)
    rows = tuple(ScheduledRequest(f"r{i}", 300, (5,), (tuple(range(20)),), (0,), params) for i in range(32))
    best = 1.0
    for _ in range(50):
        started = time.perf_counter()
        builder.build(SchedulerOutput(0, rows), {})
        best = min(best, time.perf_counter() - started)
    assert best < 0.3e-3


def test_ends_are_banned_until_min_tokens_are_out() -> None:
    """With min_tokens 2 the end may be the third token, and not before."""
    params = SamplingParams(max_tokens=9, min_tokens=2)
    ref = SamplingRef(params, 0, 0, end_token_ids=(0, 5))
    builder, banned = BatchBuilder(), []
    for output in ((), (7,), (7, 8), (7, 8, 9)):
        tokens = (1, 2, *output)
        step = ScheduledRequest("a", len(tokens) - 1, tokens[-1:], ((3,),), (0,), ref, TokenHistory((1, 2), output))
        extras = builder.build(plan(step), {}).sampling.extras
        banned.append(extras.banned[0].tolist())
    assert banned == [[0, 5], [0, 5], [], []]


def test_a_history_is_rebuilt_when_it_is_not_what_was_kept() -> None:
    """Kept or not, cut, marked LastSampled or drawn at several places: a draw sees the tokens before it."""
    prompt, params = (1, 2, 3), SamplingParams(max_tokens=9, repetition_penalty=2.0)
    ref = SamplingRef(params, 0, 0)

    def seen(builder: BatchBuilder, computed: int, tokens: tuple[InputToken, ...], output: tuple[int, ...],
             wants: tuple[int, ...]) -> list[list[int]]:
        row = ScheduledRequest("a", computed, tokens, ((3,),), wants, ref, TokenHistory(prompt, output))
        extras = builder.build(plan(row), {"a": 8}).sampling.extras
        return [extras.history[i].tolist() for i in range(len(wants))]

    kept = BatchBuilder()
    for builder in (kept, BatchBuilder()):
        assert seen(builder, 0, (1, 2, 3), (), (2,)) == [[1, 2, 3]]
        assert seen(builder, 3, (7,), (7,), (0,)) == [[1, 2, 3, 7]]
        assert seen(builder, 4, (LastSampled.TOKEN,), (7,), (0,)) == [[1, 2, 3, 7, 8]]
    assert seen(kept, 4, (8, 9), (7, 8, 9), (0, 1)) == [[1, 2, 3, 7, 8], [1, 2, 3, 7, 8, 9]]
    assert seen(kept, 2, (3, 7), (7,), (1,)) == [[1, 2, 3, 7]]


def test_a_row_that_looks_back_needs_its_history() -> None:
    with pytest.raises(InvariantError, match="no history"):
        BatchBuilder().build(plan(row("a", 0, [1], (0,), SamplingParams(max_tokens=1, presence_penalty=1.0))), {})


def test_rows_that_ask_for_nothing_carry_nothing() -> None:
    assert BatchBuilder().build(plan(row("a", 0, [1, 2], (0,))), {}).sampling.extras is None

"""Plan -> arrays. On the critical path of every step: lists are filled in one pass, then each becomes one array.

Keeps block tables as arrays, keyed by request id and by the identity of the plan's tuple (the scheduler makes a new
tuple whenever a block is added or replaced). The cache holds the rows of the last plan only and can be dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvariantError
from ..kv.groups import NULL_BLOCK
from ..ops.interface import ForwardBatch, SamplingBatch
from ..sched.plan import InputToken, LastSampled, ScheduledRequest, SchedulerOutput, TransferKind
from .extras import Entry, ExtrasBuilder

SEED_MASK = (1 << 64) - 1
WHOLE_VOCABULARY = 0
MAX_TOP_K = (1 << 31) - 1
SCORED = (0.0, 0, 1.0, 0, 0, 0, 0, True)    # the columns of a position that is scored: nothing is drawn there


class BatchBuilder:
    """Builds the arrays of a step."""

    def __init__(self, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self._tables: dict[str, tuple[tuple[tuple[int, ...], ...], NDArray[np.int32]]] = {}
        self._extras = ExtrasBuilder()

    def build(self, plan: SchedulerOutput, last_sampled: Mapping[str, int]) -> ForwardBatch:
        """last_sampled: tokens the step before this one drew, by request id; LastSampled markers stand for them."""
        token_ids: list[int] = []
        positions: list[int] = []
        row_starts = [0]
        wanted: list[int] = []
        for row in plan.all_rows:
            first, start = row.num_computed_tokens, row_starts[-1]
            if LastSampled.TOKEN in row.token_ids:
                token_ids += [_resolved(token, row, last_sampled) for token in row.token_ids]
            else:
                token_ids += row.token_ids    # type: ignore[arg-type]
            positions += range(first, first + len(row.token_ids))
            if row.scored is not None:
                wanted += range(start + row.scored.first_offset, start + row.scored.first_offset + row.num_scored)
            wanted += [start + offset for offset in row.logits_offsets]
            row_starts.append(start + len(row.token_ids))
        return ForwardBatch(
            np.array(token_ids, np.int32), np.array(positions, np.int32), np.array(row_starts, np.int32),
            self._block_tables(plan.all_rows), np.array(wanted, np.int32), _copies(plan),
            self._sampling_batch(plan.all_rows, token_ids, row_starts))

    def drop_caches(self) -> None:
        """Forgets what can be rebuilt from the next plan."""
        self._tables.clear()
        self._extras.drop_caches()

    def _block_tables(self, rows: tuple[ScheduledRequest, ...]) -> NDArray[np.int32]:
        before, self._tables = self._tables, {}    # rows that left are forgotten
        tables: list[NDArray[np.int32]] = []
        for row in rows:
            cached = before.get(row.request_id)
            if cached is None or cached[0] is not row.block_ids:
                cached = (row.block_ids, _padded(row.block_ids))
            self._tables[row.request_id] = cached
            tables.append(cached[1])
        longest = max((table.shape[1] for table in tables), default=1)
        stacked = np.zeros((self._num_groups, len(rows), longest), np.int32)
        for r, table in enumerate(tables):
            stacked[:, r, : table.shape[1]] = table
        return stacked

    def _sampling_batch(self, rows: Sequence[ScheduledRequest], token_ids: list[int],
                        row_starts: list[int]) -> SamplingBatch:
        """One entry per wanted position, in the order of the rows: of a row the scored ones, then those to draw."""
        columns: list[tuple[float, int, float, int, int, int, int, bool]] = []
        entries: list[Entry] = []
        for r, row in enumerate(rows):
            if row.scored is not None:
                entries += self._extras.scored(len(columns), row.scored)
                columns += [SCORED] * row.num_scored
            if not row.logits_offsets:
                continue
            ref = row.sampling
            if ref is None:
                raise InvariantError(f"{row.request_id} wants logits but says not how to sample them")
            if not ref.is_plain:
                own = token_ids[row_starts[r] : row_starts[r + 1]]
                entries += self._extras.drawn(len(columns), row, ref, own)
            params = ref.params
            top_k = WHOLE_VOCABULARY if params.top_k is None else min(params.top_k, MAX_TOP_K)
            for offset in row.logits_offsets:
                columns.append((params.temperature, top_k, params.top_p, params.seed & SEED_MASK, ref.prompt_index,
                                ref.choice_index, row.num_computed_tokens + offset + 1, params.logprobs is not None))
        fields = list(zip(*columns, strict=True)) or [()] * 8
        dtypes = (np.float32, np.int32, np.float32, np.uint64, np.uint32, np.uint32, np.uint64, np.uint8)
        arrays: list[Any] = [np.array(values, dtype) for values, dtype in zip(fields, dtypes, strict=True)]
        arrays.append(self._extras.build(entries))
        return SamplingBatch(*arrays)


def _padded(block_ids: tuple[tuple[int, ...], ...]) -> NDArray[np.int32]:
    """The tables of a request's groups as one array; they may differ in length before a step needs them all."""
    longest = max(map(len, block_ids))
    return np.array([table + (NULL_BLOCK,) * (longest - len(table)) for table in block_ids], np.int32)


def _resolved(token: InputToken, row: ScheduledRequest, last_sampled: Mapping[str, int]) -> int:
    if not isinstance(token, LastSampled):
        return token
    if row.request_id not in last_sampled:
        raise InvariantError(f"{row.request_id} continues from a token that the step before did not sample")
    return max(last_sampled[row.request_id], 0)    # a failed draw is -1: the executor fails this row too


def _copies(plan: SchedulerOutput) -> NDArray[np.int32]:
    for transfer in plan.transfers:
        if transfer.kind is not TransferKind.COPY:
            raise InvariantError(f"this executor does not run {transfer}")
    pairs = [(transfer.source, transfer.destination) for transfer in plan.transfers]
    return np.array(pairs, np.int32).reshape(len(pairs), 2)

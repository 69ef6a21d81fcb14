"""Rope, cache and attention through a program of nothing else: an embedding row is a token's q, k and v, and the result
of attention leaves as logits.

Every block is full of NaN before the first step, so whoever reads a slot that holds no token shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Floats = NDArray[np.float32]
NUM_POSITIONS = 1700
LONG = 3 * 512 + 5


def to_bf16(x: Floats) -> Floats:
    raw = x.view(np.uint32)
    return ((raw + 0x7FFF + (raw >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@dataclass(frozen=True)
class Shape:
    heads: int = 3
    kv_heads: int = 1
    dim: int = 64
    gain: float = 1.0    # of q, k and v
    rotary_dim: int | None = None    # None: the whole head; 0: none of it
    softcap: float = 0.0
    window: int = 0      # tokens a query sees; 0: all before it

    @property
    def vocab_size(self) -> int:
        return self.heads * self.dim

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


def qkv_table(shape: Shape, seed: int = 0) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.normal(0.0, 1.5 * shape.gain, (shape.vocab_size, shape.width)).astype(np.float32)


def rope_table(shape: Shape) -> Floats:
    half = (shape.dim if shape.rotary_dim is None else shape.rotary_dim) // 2
    angle = np.arange(NUM_POSITIONS)[:, None] * 10000.0 ** (-np.arange(half) / max(half, 1))
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


class Attention:
    """One layer's attention over rows that each own some blocks."""

    def __init__(self, kernels: ModuleType, path: str, shape: Shape, dtype: str = "bf16", block_size: int = 16,
                 num_threads: int = 1, num_rows: int = 1, seed: int = 0, infinite_token: int | None = None) -> None:
        table = qkv_table(shape)
        if infinite_token is not None:
            table[infinite_token, -shape.kv_heads * shape.dim :] = np.finfo(np.float32).max    # infinite in bf16
        packed = kernels.pack("f32", shape.width, [("F32", table.view(np.uint8), None)])
        self.block_size, self.window = block_size, shape.window
        self.blocks_per_row = -(-NUM_POSITIONS // block_size)
        num_blocks = num_rows * self.blocks_per_row
        buffers = [(0, "tokens", shape.width), (1, "tokens", shape.vocab_size), (2, "tokens", shape.vocab_size),
                   (3, "wanted", shape.vocab_size)]
        nodes: list[tuple[Any, ...]] = [
            ("embed", [], 0, ["table"], {}),
            ("rope_write_kv", [0], 1, [] if shape.rotary_dim == 0 else ["rope"], {"layer": 1}),
            ("paged_attention", [1], 2, [], {"layer": 1, "scale": shape.dim**-0.5, "softcap": shape.softcap,
                                              "window": shape.window}),
            ("select_wanted", [2], 3, [], {}),
            ("sample", [3], -1, [], {}),
        ]
        kv = {"num_layers": 2, "num_kv_heads": shape.kv_heads, "head_dim": shape.dim, "block_size": block_size,
              "num_blocks": num_blocks, "dtype": dtype}
        weights = {"table": packed, "rope": rope_table(shape)} if shape.rotary_dim != 0 else {"table": packed}
        self.runner = kernels.Runner(path, num_threads, buffers, nodes, weights, shape.heads, shape.kv_heads, shape.dim,
                                     shape.vocab_size, kv)
        self.runner.poison(np.arange(num_blocks, dtype=np.int32))
        owners = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        self.tables = owners.reshape(num_rows, self.blocks_per_row)
        self.num_computed = [0] * num_rows

    def step(self, new_tokens: dict[int, NDArray[np.int32]]) -> dict[int, Floats]:
        """Runs the next tokens of some rows; what attention gave each of them."""
        rows = list(new_tokens)
        counts = [len(new_tokens[row]) for row in rows]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([self.num_computed[row] + np.arange(len(new_tokens[row])) for row in rows])
        num_tokens = int(starts[-1])
        tables = self.tables[rows]
        for i, row in enumerate(rows):    # entries past a row's need must not be read: they would lead far astray
            tables[i, -(-(self.num_computed[row] + counts[i]) // self.block_size) :] = -(2**30)
            seen_from = max(self.num_computed[row] + 1 - self.window, 0) if self.window else 0
            tables[i, : seen_from // self.block_size] = -(2**30)
        zeros = np.zeros(num_tokens, np.uint32)
        out = self.runner.step(
            np.concatenate([new_tokens[row] for row in rows]).astype(np.int32), positions.astype(np.int32), starts,
            tables[None], np.arange(num_tokens, dtype=np.int32), np.zeros((0, 2), np.int32),
            zeros.astype(np.float32), zeros.astype(np.int32), np.ones(num_tokens, np.float32), zeros.astype(np.uint64),
            zeros, zeros, zeros.astype(np.uint64), zeros.astype(np.uint8), wants_logits=True)[2]
        for row, count in zip(rows, counts, strict=True):
            self.num_computed[row] += count
        return {row: out[starts[i] : starts[i + 1]] for i, row in enumerate(rows)}

    def feed(self, token_ids: NDArray[np.int32], chunks: Sequence[int], row: int = 0) -> Floats:
        """One row in chunks of the given sizes, the last size repeated as long as tokens last."""
        parts, at = [], 0
        sizes = list(chunks)
        while at < len(token_ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            parts.append(self.step({row: token_ids[at : at + size]})[row])
            at += size
        return np.concatenate(parts)


def tokens(shape: Shape, count: int, seed: int = 1) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, shape.vocab_size, count).astype(np.int32)


@cache
def oracle(shape: Shape, count: int, dtype: str) -> tuple[NDArray[np.float64], float]:
    """Attention of `count` tokens in float64 over the rounded q, k and v; and the largest |v|."""
    token_ids = tokens(shape, count)
    qkv = qkv_table(shape)[token_ids].reshape(len(token_ids), -1, shape.dim)
    cos, sin = np.split(rope_table(shape)[: len(token_ids), None], 2, axis=-1)
    half = cos.shape[-1]
    low, high, rest = np.split(qkv[:, : shape.heads + shape.kv_heads], (half, 2 * half), axis=-1)
    rotated = np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)
    rounded = (lambda x: to_bf16(np.ascontiguousarray(x))) if dtype == "bf16" else (lambda x: x)
    q = rounded(rotated[:, : shape.heads]).astype(np.float64)
    k = rounded(rotated[:, shape.heads :]).astype(np.float64)
    v = rounded(qkv[:, shape.heads + shape.kv_heads :]).astype(np.float64)
    group = shape.heads // shape.kv_heads
    scores = np.einsum("qhd,khd->hqk", q, k.repeat(group, axis=1)) * shape.dim**-0.5
    if shape.softcap:
        scores = np.tanh(scores / shape.softcap) * shape.softcap
    is_seen = np.tri(len(token_ids), dtype=bool)
    if shape.window:
        is_seen &= ~np.tri(len(token_ids), k=-shape.window, dtype=bool)
    scores[:, ~is_seen] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", p, v.repeat(group, axis=1))
    return out.reshape(len(token_ids), -1), float(np.abs(v).max())


# A probability rounded to bf16 is off by 2^-9 of itself at most, before and after the sum that divides it.
STATED_ERROR = {"bf16": 2.0**-8, "f32": 4e-6}    # of the largest |v|


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("shape", [Shape(1, 1, 64), Shape(3, 1, 64), Shape(6, 2, 64), Shape(4, 1, 16), Shape(7, 1, 48),
                                   Shape(2, 2, 80), Shape(8, 2, 128), Shape(2, 1, 256), Shape(3, 1, 64, rotary_dim=16),
                                   Shape(2, 1, 80, rotary_dim=20), Shape(2, 1, 32, rotary_dim=0),
                                   Shape(3, 1, 64, softcap=3.0), Shape(4, 2, 16, softcap=20.0),
                                   Shape(3, 1, 64, window=1), Shape(6, 2, 32, window=33), Shape(2, 1, 64, window=64),
                                   Shape(4, 2, 16, window=70, softcap=5.0), Shape(2, 1, 16, window=555)], ids=str)
def test_attention_is_what_float64_says(kernels: ModuleType, path: str, shape: Shape, dtype: str) -> None:
    token_ids = tokens(shape, 600)
    out = Attention(kernels, path, shape, dtype).feed(token_ids, [600])
    expected, largest_v = oracle(shape, len(token_ids), dtype)
    assert np.abs(out - expected).max() < STATED_ERROR[dtype] * largest_v


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("window", [0, 130, 700])
def test_long_contexts_are_what_float64_says(kernels: ModuleType, path: str, dtype: str, window: int) -> None:
    shape = Shape(2, 1, 16, window=window)
    token_ids = tokens(shape, LONG)
    out = Attention(kernels, path, shape, dtype, num_threads=2).feed(token_ids, [LONG])
    expected, largest_v = oracle(shape, len(token_ids), dtype)
    assert np.abs(out - expected).max() < STATED_ERROR[dtype] * largest_v


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(("heads", "window"), [(1, 0), (3, 0), (4, 0), (7, 0), (1, 100), (3, 17), (7, 600)])
def test_prefill_is_token_by_token_decode(kernels: ModuleType, path: str, heads: int, window: int, dtype: str) -> None:
    shape = Shape(heads, 1, 16, window=window)
    token_ids = tokens(shape, LONG)
    whole = Attention(kernels, path, shape, dtype).feed(token_ids, [LONG])
    assert np.isfinite(whole).all()
    one_by_one = Attention(kernels, path, shape, dtype, seed=1).feed(token_ids, [1])
    assert one_by_one.tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_chunks_threads_and_blocks_change_no_bit(kernels: ModuleType, path: str, block_size: int, dtype: str) -> None:
    shape = Shape(6, 2, 64)
    token_ids = tokens(shape, 1100)
    whole = Attention(kernels, path, shape, dtype).feed(token_ids, [1100])
    rng = np.random.default_rng(block_size)
    for num_threads, chunks in ((1, [63, 1, 1, 64]), (2, [511, 1, 1, 7]), (3, [1024, 1]), (2, [700, 35, 100])):
        attention = Attention(kernels, path, shape, dtype, block_size, num_threads, seed=int(rng.integers(1000)))
        assert attention.feed(token_ids, chunks).tobytes() == whole.tobytes(), (num_threads, chunks)


def test_every_number_of_rows_of_a_prefill_gives_the_rows_alone(kernels: ModuleType, path: str) -> None:
    shape = Shape(3, 1, 64)    # 16 tokens make a tile
    edges = [1, 2, 15, 16, 17, 31, 33, 35]
    for start in (0, 50, 500):
        token_ids = tokens(shape, start + max(edges))
        whole = Attention(kernels, path, shape).feed(token_ids, [len(token_ids)])
        for count in edges:
            attention = Attention(kernels, path, shape, block_size=32, num_threads=2, seed=count)
            if start:
                attention.feed(token_ids[:start], [start])
            part = attention.step({0: token_ids[start : start + count]})[0]
            assert part.tobytes() == whole[start : start + count].tobytes(), (start, count)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_row_does_not_see_its_batch_mates(kernels: ModuleType, path: str, dtype: str) -> None:
    shape = Shape(6, 2, 64)
    contexts = [1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1030, 200]
    streams = [tokens(shape, context + 3, seed=context) for context in contexts]
    alone = []
    for stream in streams:
        attention = Attention(kernels, path, shape, dtype)
        attention.feed(stream[:-3], [len(stream)])
        alone.append(attention.feed(stream[-3:], [1]))
    for num_threads in (2, 3):
        together = Attention(kernels, path, shape, dtype, 32, num_threads, num_rows=len(streams), seed=num_threads)
        together.step({row: stream[:-3] for row, stream in enumerate(streams)})
        first = together.step({row: stream[-3:-2] for row, stream in enumerate(streams)})
        # Now a mixed step: even rows decode one token, odd rows take two.
        second = together.step({row: stream[-2 : (-1 if row % 2 == 0 else None)] for row, stream in enumerate(streams)})
        for row in range(len(streams)):
            got = np.concatenate([first[row], second[row]])
            assert got.tobytes() == alone[row][: len(got)].tobytes(), (num_threads, contexts[row])


@pytest.mark.parametrize("shape", [Shape(3, 1, 32, rotary_dim=8), Shape(3, 1, 32, rotary_dim=0),
                                   Shape(7, 1, 32, softcap=2.0), Shape(6, 2, 32, window=40),
                                   Shape(3, 1, 32, window=530)], ids=str)
def test_variants_are_the_same_in_any_company(kernels: ModuleType, path: str, shape: Shape) -> None:
    token_ids = tokens(shape, 600)
    whole = Attention(kernels, path, shape).feed(token_ids, [600])
    for num_threads, chunks in ((1, [1]), (2, [511, 1, 1, 7]), (3, [64, 1])):
        attention = Attention(kernels, path, shape, "bf16", 32, num_threads, seed=num_threads)
        assert attention.feed(token_ids, chunks).tobytes() == whole.tobytes(), (num_threads, chunks)


@pytest.mark.parametrize("chunks", [[90], [1], [33, 7]], ids=str)
def test_an_infinite_value_is_forgotten_when_the_window_has_passed(kernels: ModuleType, path: str,
                                                                   chunks: list[int]) -> None:
    shape = Shape(3, 1, 16, window=20)
    token_ids = np.maximum(tokens(shape, 90), 1)
    healthy = Attention(kernels, path, shape).feed(token_ids, [90])
    sick_ids = token_ids.copy()
    sick_ids[[0, 41]] = 0    # the token whose values are infinite
    sick = Attention(kernels, path, shape, infinite_token=0).feed(sick_ids, chunks)
    sees_one = (np.arange(90) < 20) | ((np.arange(90) >= 41) & (np.arange(90) < 61))
    assert not np.isfinite(sick[sees_one]).all(axis=1).any()
    unseen = np.flatnonzero(~sees_one)
    assert sick[unseen].tobytes() == healthy[unseen].tobytes()


def test_scores_hundreds_apart_leave_no_nan(kernels: ModuleType, path: str) -> None:
    """Chunks and segments whose largest scores differ by e^100s: what weighs nothing any more vanishes cleanly."""
    shape = Shape(3, 1, 16, gain=8.0)
    token_ids = tokens(shape, 600)
    out = Attention(kernels, path, shape, "f32").feed(token_ids, [600])
    expected, largest_v = oracle(shape, len(token_ids), "f32")
    assert np.abs(out - expected).max() < 1e-3 * largest_v    # a score near 1000 is known to 6e-5

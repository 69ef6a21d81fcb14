"""Weights as their file holds them -> float32. One small function a source type, in a visible table.

GGML block types hold 32 inputs a block: a float16 scale d (and a float16 minimum m), then the quants. The low nibbles
of a 4-bit block are its first 16 inputs, the high nibbles its last 16.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from .interface import SourceTensor

F32 = NDArray[np.float32]
BF16_NAN = np.uint16(0x7FC0)
BLOCKS: dict[str, tuple[int, int]] = {    # inputs and bytes of one block
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34),
}


def dequantize(source: SourceTensor) -> F32:
    """The values of a weight, float32 [num_outputs, num_inputs], rows in packed order."""
    if source.source_type not in DEQUANTIZERS:
        raise ModelError(f"{source.name}: type {source.source_type!r} has no dequantiser; known: {list(DEQUANTIZERS)}")
    expected = (source.num_outputs, row_bytes(source.source_type, source.num_inputs))
    if source.raw.shape != expected:
        raise ModelError(f"{source.name}: {source.source_type} [{source.num_outputs}, {source.num_inputs}] takes "
                         f"{expected} bytes, the file has {source.raw.shape}")
    raw = source.raw if source.row_order is None else source.raw[source.row_order]
    values = DEQUANTIZERS[source.source_type](np.ascontiguousarray(raw))
    return np.ascontiguousarray(values.reshape(source.num_outputs, source.num_inputs), dtype=np.float32)


def row_bytes(source_type: str, num_inputs: int) -> int:
    """Bytes of one output row."""
    block_inputs, block_bytes = BLOCKS[source_type]
    if num_inputs % block_inputs:
        raise ModelError(f"{source_type} rows hold a multiple of {block_inputs} inputs, not {num_inputs}")
    return num_inputs // block_inputs * block_bytes


def bf16_bits(values: F32) -> NDArray[np.uint16]:
    """Rounds to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), BF16_NAN, rounded)


def from_bf16_bits(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _f32(raw: NDArray[np.uint8]) -> F32:
    return raw.view("<f4")


def _f16(raw: NDArray[np.uint8]) -> F32:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: NDArray[np.uint8]) -> F32:
    return from_bf16_bits(raw.view("<u2"))


def _q8_0(raw: NDArray[np.uint8]) -> F32:
    blocks = raw.reshape(-1, 34)
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(raw: NDArray[np.uint8]) -> F32:
    blocks = raw.reshape(-1, 18)
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - np.float32(8))


def _q4_1(raw: NDArray[np.uint8]) -> F32:
    blocks = raw.reshape(-1, 20)
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)    # the product is exact: one rounding


def _half(blocks: NDArray[np.uint8], offset: int) -> F32:
    """The float16 at a byte offset of each block, as a column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> F32:
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


DEQUANTIZERS: dict[str, Callable[[NDArray[np.uint8]], F32]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0,
}

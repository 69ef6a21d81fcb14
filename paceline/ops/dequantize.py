"""Weights as their file holds them -> float32. One small function a source type, in a visible table.

GGML block types hold 32 inputs a block: a float16 scale d (and a float16 minimum m), then the quants. The low nibbles
of a 4-bit block are its first 16 inputs, the high nibbles its last 16. K-quants hold 256 inputs a block, in groups of
16 or 32 whose small integer scales (and minima) multiply d (and dmin); the bits of one byte belong to inputs 32 apart.

Every product below is exact in float32, so that a value is rounded at most once, whoever computes it and how.
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
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210), "IQ4_NL": (32, 18), "MXFP4": (32, 17),
}
IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)    # twice e2m1


def dequantize(source: SourceTensor) -> F32:
    """The values of a weight, float32 [num_outputs, num_inputs], rows in packed order."""
    if source.source_type not in DEQUANTIZERS:
        raise ModelError(f"{source.name}: type {source.source_type!r} has no dequantiser; known: {list(DEQUANTIZERS)}")
    expected = (source.num_outputs, row_bytes(source.source_type, source.num_inputs))
    raw = source.raw    # once: some sources make it anew each time
    if raw.shape != expected:
        raise ModelError(f"{source.name}: {source.source_type} [{source.num_outputs}, {source.num_inputs}] takes "
                         f"{expected} bytes, the file has {raw.shape}")
    raw = raw if source.row_order is None else raw[source.row_order]
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


def _q5_0(raw: NDArray[np.uint8]) -> F32:
    blocks = raw.reshape(-1, 22)
    return _half(blocks, 0) * (_nibbles(blocks[:, 6:]) + _fifth_bits(blocks, 2) - np.float32(16))


def _q5_1(raw: NDArray[np.uint8]) -> F32:
    blocks = raw.reshape(-1, 24)
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) + _fifth_bits(blocks, 4)) + _half(blocks, 2)


def _q2_k(raw: NDArray[np.uint8]) -> F32:
    blocks = raw.reshape(-1, 84)    # scales and minima [16], quants [64], d, dmin
    d, minimum = _half(blocks, 80) * (blocks[:, :16] & 15), _half(blocks, 82) * (blocks[:, :16] >> 4)
    quants = _spread(blocks[:, 16:80], 2).reshape(-1, 16, 16)
    return d[..., None] * quants - minimum[..., None]


def _q3_k(raw: NDArray[np.uint8]) -> F32:
    blocks = raw.reshape(-1, 110)    # third bits [32], quants [64], scales [12], d
    low = np.concatenate([blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4], axis=1)
    high = np.concatenate([(blocks[:, 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    d = _half(blocks, 108) * ((low | high << 4).astype(np.float32) - np.float32(32))
    quants = _spread(blocks[:, 32:96], 2) + np.float32(4) * _spread(blocks[:, :32], 1) - np.float32(4)
    return d[..., None] * quants.reshape(-1, 16, 16)


def _q4_k(raw: NDArray[np.uint8]) -> F32:
    d, quants, minimum = q4_k_parts(raw)
    return d * quants - minimum


def q4_k_parts(raw: NDArray[np.uint8]) -> tuple[F32, F32, F32]:
    """Scales, quants and minima of groups of 32: value = scale * quant - minimum."""
    blocks = raw.reshape(-1, 144)    # d, dmin, scales and minima [12], quants [128]
    d, minimum = _six_bit_scales(blocks)
    return d, _spread(blocks[:, 16:], 4), minimum


def _q5_k(raw: NDArray[np.uint8]) -> F32:
    blocks = raw.reshape(-1, 176)    # d, dmin, scales and minima [12], fifth bits [32], quants [128]
    d, minimum = _six_bit_scales(blocks)
    return d * (_spread(blocks[:, 48:], 4) + np.float32(16) * _spread(blocks[:, 16:48], 1)) - minimum


def _q6_k(raw: NDArray[np.uint8]) -> F32:
    blocks = raw.reshape(-1, 210)    # low four bits [128], high two bits [64], scales int8 [16], d
    d = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    low = _spread(blocks[:, :128], 4, width=64).reshape(-1, 16, 16)
    high = _spread(blocks[:, 128:192], 2).reshape(-1, 16, 16)
    quants: F32 = low + np.float32(16) * high - np.float32(32)
    return np.asarray(d[..., None] * quants, np.float32)


def _iq4_nl(raw: NDArray[np.uint8]) -> F32:
    blocks = raw.reshape(-1, 18)
    return _half(blocks, 0) * IQ4_NL_VALUES[_nibble_indices(blocks[:, 2:])]


def _mxfp4(raw: NDArray[np.uint8]) -> F32:
    d, quants = mxfp4_parts(raw)
    return d * quants


def mxfp4_parts(raw: NDArray[np.uint8]) -> tuple[F32, F32]:
    """Scales (powers of two) and quants of groups of 32."""
    blocks = raw.reshape(-1, 17)
    exponent = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32), MXFP4_VALUES[_nibble_indices(blocks[:, 1:])]


def _half(blocks: NDArray[np.uint8], offset: int) -> F32:
    """The float16 at a byte offset of each block, as a column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibble_indices(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _nibbles(packed: NDArray[np.uint8]) -> F32:
    return _nibble_indices(packed).astype(np.float32)


def _fifth_bits(blocks: NDArray[np.uint8], offset: int) -> F32:
    """16 where the bit of an input is set among the 32 at a byte offset."""
    bits = np.unpackbits(blocks[:, offset : offset + 4], axis=1, bitorder="little")
    return np.float32(16) * bits.astype(np.float32)


def _spread(packed: NDArray[np.uint8], num_bits: int, width: int = 32) -> F32:
    """Quants of num_bits, [blocks, 8, 32]: of each `width` bytes first all lowest bits, then all of the next ones."""
    shifts = np.arange(0, 8, num_bits, dtype=np.uint8)[:, None]
    fields = (packed.reshape(len(packed), -1, 1, width) >> shifts) & np.uint8((1 << num_bits) - 1)
    return fields.reshape(len(packed), 8, 32).astype(np.float32)


def _six_bit_scales(blocks: NDArray[np.uint8]) -> tuple[F32, F32]:
    """Scales and minima of the 8 groups of a Q4_K or Q5_K block, each [blocks, 8, 1]."""
    first, second, third = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minimum = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)
    return (_half(blocks, 0) * scale)[..., None], (_half(blocks, 2) * minimum)[..., None]


DEQUANTIZERS: dict[str, Callable[[NDArray[np.uint8]], F32]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4,
}

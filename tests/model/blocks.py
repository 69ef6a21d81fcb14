"""Plausible bytes of block types that gguf-py cannot write: bell-shaped quants, scales as a quantiser picks them."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

from paceline.ops.dequantize import BLOCKS
from paceline.ops.interface import SourceTensor

Bytes = NDArray[np.uint8]

HALVES = {    # byte offsets of a block's float16 numbers
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "MXFP4": (),
}


def any_blocks(kind: str, num_outputs: int, num_inputs: int, seed: int = 0) -> Bytes:
    """Random bytes, every float16 finite and below 8192."""
    block_inputs, block_bytes = BLOCKS[kind]
    blocks = np.random.default_rng(seed).integers(
        0, 256, (num_outputs * num_inputs // block_inputs, block_bytes)).astype(np.uint8)
    for offset in HALVES[kind]:
        blocks[:, offset + 1] &= 0xEF
    if kind == "MXFP4":
        blocks[:, 0] = 110 + blocks[:, 0] % 32
    return blocks.reshape(num_outputs, -1)


def weight_blocks(kind: str, num_outputs: int, num_inputs: int, seed: int = 0) -> Bytes:
    """What a model's file may hold: values around zero, of a standard deviation near 0.02."""
    if kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"):
        values = np.random.default_rng(seed).normal(0, 0.02, (num_outputs, num_inputs)).astype(np.float32)
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        return np.ascontiguousarray(raw).view(np.uint8).reshape(num_outputs, -1)
    rng = np.random.default_rng(seed)
    count = num_outputs * num_inputs // BLOCKS[kind][0]
    return np.concatenate(FIELDS[kind](rng, count), axis=1).reshape(num_outputs, -1)


def source(kind: str, num_outputs: int, num_inputs: int, seed: int = 0, name: str = "w") -> SourceTensor:
    return SourceTensor(name, num_outputs, num_inputs, kind, weight_blocks(kind, num_outputs, num_inputs, seed))


def _half(rng: np.random.Generator, count: int, least: float) -> Bytes:
    return rng.uniform(least, 2 * least, (count, 1)).astype(np.float16).view(np.uint8)


def _bell(rng: np.random.Generator, count: int, width: int, num_bits: int) -> NDArray[np.int64]:
    most = (1 << num_bits) - 1
    return np.clip(np.rint(rng.normal(most / 2, most / 5, (count, width))), 0, most).astype(np.int64)


def _packed(quants: NDArray[np.int64], num_bits: int) -> Bytes:
    """Which quant gets which bits does not matter for quants drawn alike."""
    per_byte = 8 // num_bits
    parts = quants.reshape(len(quants), per_byte, -1)
    return sum(parts[:, i] << (num_bits * i) for i in range(per_byte)).astype(np.uint8)


def _six_bit(rng: np.random.Generator, count: int) -> Bytes:
    """Scales and minima of Q4_K and Q5_K, both from 24 to 63: the minimum keeps the values around zero."""
    scale = rng.integers(24, 64, (count, 8))
    parts = [scale[:, :4] | (scale[:, 4:] >> 4) << 6] * 2
    return np.concatenate([*parts, (scale[:, 4:] & 15) * 17], axis=1).astype(np.uint8)


def _k4(rng: np.random.Generator, count: int, num_bits: int) -> list[Bytes]:
    d = rng.uniform(1, 2, (count, 1)) * 0.1 / (1 << num_bits) / 44
    halves = [half.astype(np.float16).view(np.uint8) for half in (d, d * ((1 << num_bits) - 1) / 2)]
    quants = _bell(rng, count, 256, num_bits)
    fifth = [] if num_bits == 4 else [_packed(quants >> 4, 1)]
    return [*halves, _six_bit(rng, count), *fifth, _packed(quants & 15, 4)]


def _q2_k(rng: np.random.Generator, count: int) -> list[Bytes]:
    scale = rng.integers(6, 16, (count, 16))
    d = rng.uniform(1, 2, (count, 1)) * 0.03 / 11
    halves = [half.astype(np.float16).view(np.uint8) for half in (d, d * 1.5)]
    return [(scale * 17).astype(np.uint8), _packed(_bell(rng, count, 256, 2), 2), *halves]


def _q3_k(rng: np.random.Generator, count: int) -> list[Bytes]:
    scale = rng.integers(0, 16, (count, 16)) + 48 * rng.integers(0, 2, (count, 16))    # far from 32, which means 0
    low = (scale & 15)[:, :8] | (scale & 15)[:, 8:] << 4
    high = sum((scale >> 4)[:, 4 * i : 4 * i + 4] << (2 * i) for i in range(4))
    quants = _bell(rng, count, 256, 3)
    return [_packed(quants >> 2, 1), _packed(quants & 3, 2), low.astype(np.uint8), high.astype(np.uint8),
            _half(rng, count, 0.0005)]


def _q6_k(rng: np.random.Generator, count: int) -> list[Bytes]:
    scales = (rng.integers(60, 128, (count, 16)) * rng.choice([-1, 1], (count, 16))).astype(np.int8).view(np.uint8)
    quants = _bell(rng, count, 256, 6)
    return [_packed(quants & 15, 4), _packed(quants >> 4, 2), scales, _half(rng, count, 0.00001)]


FIELDS = {
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": lambda rng, count: _k4(rng, count, 4),
    "Q5_K": lambda rng, count: _k4(rng, count, 5), "Q6_K": _q6_k,
    "IQ4_NL": lambda rng, count: [_half(rng, count, 0.0004), _packed(_bell(rng, count, 32, 4), 4)],
}

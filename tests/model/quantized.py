"""Quantised checkpoints as AutoAWQ, AutoGPTQ and FP8 writers store them, and the float64 values they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import tiny

Arrays = dict[str, NDArray[Any]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class FourBit:
    """A linear: quants [outputs, inputs], scales and zero points [outputs, groups]."""

    quants: NDArray[np.int64]
    scales: NDArray[np.float16]
    zeros: NDArray[np.int64]

    @property
    def values(self) -> NDArray[np.float64]:
        times = self.quants.shape[1] // self.scales.shape[1]
        scales, zeros = (np.repeat(part.astype(np.float64), times, axis=1) for part in (self.scales, self.zeros))
        return scales * (self.quants - zeros)


def quantized(weight: NDArray[np.float32], group_size: int, is_symmetric: bool) -> FourBit:
    groups = weight.reshape(len(weight), -1, group_size)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    scales = (np.maximum(-low, high) * 2 if is_symmetric else high - low) / 15
    scales = np.where(scales == 0, 1, scales).astype(np.float16)
    wide = scales.astype(np.float64)
    zeros = np.full(scales.shape, 8) if is_symmetric else np.clip(np.rint(-low / wide), 0, 15).astype(np.int64)
    quants = np.clip(np.rint(groups / wide[..., None]) + zeros[..., None], 0, 15).astype(np.int64)
    return FourBit(quants.reshape(weight.shape), scales, zeros)


def words(nibbles: NDArray[np.int64], order: tuple[int, ...]) -> NDArray[np.int32]:
    """Eight neighbours along the last axis in one word; nibble i holds neighbour order[i]."""
    groups = nibbles.reshape(*nibbles.shape[:-1], -1, 8)
    packed = sum((groups[..., column] & 15) << (4 * i) for i, column in enumerate(order))
    return np.ascontiguousarray(packed).astype(np.uint32).view(np.int32)


def awq_arrays(at: str, linear: FourBit) -> Arrays:
    return {at + ".qweight": words(linear.quants.T, AWQ_ORDER), at + ".qzeros": words(linear.zeros.T, AWQ_ORDER),
            at + ".scales": np.ascontiguousarray(linear.scales.T)}


def gptq_arrays(at: str, linear: FourBit, is_v2: bool = False) -> Arrays:
    inputs = np.arange(linear.quants.shape[1])
    plain = tuple(range(8))
    return {at + ".qweight": np.ascontiguousarray(words(linear.quants, plain).T),
            at + ".qzeros": words((linear.zeros - (not is_v2)).T, plain),
            at + ".scales": np.ascontiguousarray(linear.scales.T),
            at + ".g_idx": (inputs // (len(inputs) // linear.scales.shape[1])).astype(np.int32)}


def four_bit_checkpoint(method: str, group_size: int = 32, is_symmetric: bool = False, **changes: Any) -> tuple[
        dict[str, Any], Arrays, dict[str, NDArray[np.float64]]]:
    """config.json, tensors by name, and the values of every quantised weight by name."""
    arrays: Arrays = {}
    values = {}
    for name, array in tiny.hf_arrays().items():
        if not name.endswith("_proj.weight"):
            arrays[name] = array
            continue
        at = name.removesuffix(".weight")
        linear = quantized(array * np.float32(0.017), group_size, is_symmetric)
        arrays |= awq_arrays(at, linear) if method == "awq" else gptq_arrays(at, linear)
        values[name] = linear.values
    settings = {"quant_method": method, "bits": 4, "group_size": group_size, **changes}
    return tiny.hf_config(quantization_config=settings), arrays, values

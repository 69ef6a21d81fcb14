"""Values of stored weights in numpy: the oracle for the packed kernels, and the path of vectors.

Follows ggml's definitions to the bit (tests compare with gguf.quants), so that the default install does not need the
gguf package. Blocks of Q4_0, Q4_1 and Q8_0 hold 32 values of one row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..ops.interface import SourceTensor

BLOCKS: dict[str, tuple[int, int]] = {    # values and bytes of one block
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34),
}


def dequantize(source: SourceTensor) -> NDArray[np.float32]:
    """Values as float32 [num_outputs, num_inputs] with row_order applied. ModelError for an unknown source type."""
    if source.source_type not in BLOCKS:
        raise ModelError(f"{source.name}: type {source.source_type} has no dequantiser; known: {sorted(BLOCKS)}")
    raw = source.raw if source.row_order is None else source.raw[source.row_order]
    values = _DEQUANTIZERS[source.source_type](np.ascontiguousarray(raw).reshape(-1))
    return values.reshape(source.num_outputs, source.num_inputs)


def _f32(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 34)                                # scale f16, 32 x int8
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 18)                                # scale f16, 16 bytes of nibbles
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]) - np.float32(8))


def _q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 20)                                # scale f16, minimum f16, 16 bytes of nibbles
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _half(blocks[:, 2:4])


def _half(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)     # [blocks, 1]


def _nibbles(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[blocks, 16] bytes -> [blocks, 32]: the low nibbles are values 0..15 of the block, the high ones 16..31."""
    return np.concatenate([raw & 15, raw >> 4], axis=1).astype(np.float32)


_DEQUANTIZERS = {"F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}

"""A tensor as a weight file holds it, whichever format the file has. Owns the memory maps; touches no values.

Knows no model: families.py gives the tensors their canonical names.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..ops.dequantize import BLOCKS, dequantize
from ..ops.interface import SourceTensor
from .fields import refuse_lfs_pointer

RAW_BYTES = {"F8_E4M3": 1, "I32": 4}    # safetensors types that are no weights until prequantized.py converts them


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """shape is row-major, outputs first; raw is a flat uint8 view of the file's map, exactly the tensor's bytes."""

    name: str
    shape: tuple[int, ...]
    source_type: str
    raw: NDArray[np.uint8]

    def to_matrix(self, row_order: NDArray[np.int64] | None = None) -> SourceTensor:
        """A SourceTensor over the same bytes. The tensor must have two dimensions (families.py checks shapes)."""
        num_outputs, num_inputs = self.shape
        raw = self.raw.reshape(num_outputs, -1)
        return SourceTensor(self.name, num_outputs, num_inputs, self.source_type, raw, row_order)

    def rows_to_matrix(self, first: int, last: int) -> SourceTensor:
        """Outputs [first, last) alone, counted over all leading dimensions (experts, then their outputs)."""
        rows = replace(self, shape=(prod(self.shape[:-1]), self.shape[-1])).to_matrix()
        return replace(rows, num_outputs=last - first, raw=rows.raw[first:last])

    def to_vector(self, row_order: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Values as float32 [length], a copy. The tensor must have one dimension."""
        (length,) = self.shape
        values = dequantize(SourceTensor(self.name, 1, length, self.source_type, self.raw.reshape(1, -1)))[0]
        return values if row_order is None else values[row_order]


def num_tensor_bytes(shape: tuple[int, ...], source_type: str) -> int | None:
    """Bytes a tensor of this shape takes; None when a row is not a whole number of blocks."""
    values_per_block, bytes_per_block = BLOCKS.get(source_type) or (1, RAW_BYTES[source_type])
    if shape and shape[-1] % values_per_block:
        return None
    num_values = 1
    for extent in shape:
        num_values *= extent
    return num_values // values_per_block * bytes_per_block


def map_file(path: Path) -> mmap.mmap:
    """A read-only memory map of the file; it lives as long as any view. ModelError when there is nothing to map."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:    # ValueError: an empty file
        raise ModelError(f"{path}: cannot be read: {error}") from error
    refuse_lfs_pointer(path, mapped[:32])
    return mapped

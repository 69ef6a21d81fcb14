"""A Hugging Face directory's safetensors weights, single or sharded, over memory maps.

The header is parsed here rather than by the safetensors package: numpy has no bf16, and we want the file's bytes as
they are, untouched until packed. With an index, exactly the tensors of its weight_map are taken from the shards it
names; other files in the directory are ignored. All failures are ModelErrors naming the file and the tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ..errors import ModelError
from .fields import read_json_fields
from .stored import RAW_BYTES, StoredTensor, map_file, num_tensor_bytes

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000     # the format's own limit
VALUE_TYPES = ("F32", "F16", "BF16")    # of weights as they are; the others belong to quantised checkpoints
_SUPPORTED = (*VALUE_TYPES, *RAW_BYTES)


@dataclass(frozen=True, slots=True)
class SafetensorsFiles:
    """tensors by their name in the files; header_sha256 covers the headers of all files read."""

    paths: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    header_sha256: str


def read_directory(directory: Path) -> SafetensorsFiles:
    """The weights of a model directory: by the index when there is one, else model.safetensors."""
    if (directory / INDEX_NAME).exists():
        return _read_sharded(directory)
    path = directory / SINGLE_NAME
    if not path.exists():
        raise ModelError(f"{directory}: holds neither {INDEX_NAME} nor {SINGLE_NAME}")
    tensors, digest = read_file(path)
    return SafetensorsFiles((path,), tensors, digest)


def _read_sharded(directory: Path) -> SafetensorsFiles:
    index_path = directory / INDEX_NAME
    weight_map = read_json_fields(index_path).mapping("weight_map").values
    if not weight_map:
        raise ModelError(f"{index_path}: weight_map is missing or empty")
    shards: dict[str, dict[str, StoredTensor]] = {}
    digest = hashlib.sha256()
    for shard in sorted({_shard_name(index_path, name, value) for name, value in weight_map.items()}):
        if not (directory / shard).exists():
            raise ModelError(f"{index_path}: weight_map names {shard}, which is not in the directory")
        shards[shard], shard_digest = read_file(directory / shard)
        digest.update(shard_digest.encode())
    tensors = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelError(f"{index_path}: weight_map puts {name} in {shard}, which does not hold it")
        tensors[name] = shards[shard][name]
    return SafetensorsFiles(tuple(directory / shard for shard in shards), tensors, digest.hexdigest())


def _shard_name(index_path: Path, tensor_name: str, value: Any) -> str:
    if not isinstance(value, str) or Path(value).name != value or not value.endswith(".safetensors"):
        raise ModelError(f"{index_path}: weight_map[{tensor_name!r}] must be a .safetensors file of the same "
                         f"directory, got {value!r:.80}")
    return value


def read_file(path: Path) -> tuple[dict[str, StoredTensor], str]:
    """All tensors of one file as views of its map, and the sha256 of its header."""
    mapped = map_file(path)
    num_header_bytes = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or num_header_bytes > min(len(mapped) - 8, _MAX_HEADER_BYTES):
        raise ModelError(f"{path}: header length {num_header_bytes} does not fit the file of {len(mapped)} bytes "
                         f"(limit {_MAX_HEADER_BYTES})")
    raw_header = mapped[8 : 8 + num_header_bytes]
    data = np.frombuffer(mapped, np.uint8, offset=8 + num_header_bytes) if len(mapped) > 8 + num_header_bytes else (
        np.empty(0, np.uint8))
    tensors = {}
    for name, entry in _parse_header(path, raw_header).items():
        if name != "__metadata__":
            shape, source_type, start, end = _checked_entry(path, name, entry, len(data))
            tensors[name] = StoredTensor(name, shape, source_type, data[start:end])
    _refuse_overlaps(path, tensors, data)
    return tensors, hashlib.sha256(raw_header).hexdigest()


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header of {len(raw)} bytes is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header must be a JSON object, got {type(header).__name__}")
    return header


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return unique


def _checked_entry(path: Path, name: str, entry: Any, num_data_bytes: int) -> tuple[tuple[int, ...], str, int, int]:
    """shape, source type, first byte and end of a header entry, all checked against the data's length."""
    if not isinstance(entry, dict):
        raise ModelError(f"{path}: tensor {name}: header entry must be an object, got {entry!r:.80}")
    source_type, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if source_type not in _SUPPORTED:
        raise ModelError(f"{path}: tensor {name}: dtype {source_type!r:.80} is not supported; "
                         f"supported: {', '.join(_SUPPORTED)}")
    if not _are_sizes(shape, 8) or not _are_sizes(offsets, 2) or len(offsets) != 2:
        raise ModelError(f"{path}: tensor {name}: shape {shape!r:.80} or data_offsets {offsets!r:.80} is malformed")
    start, end = offsets
    needed = num_tensor_bytes(tuple(shape), source_type)
    if not start <= end <= num_data_bytes or end - start != needed:
        raise ModelError(f"{path}: tensor {name}: data_offsets [{start}, {end}] do not hold {source_type} of shape "
                         f"{shape!r:.80} ({num_tensor_bytes((1,), source_type)} bytes a value) within "
                         f"{num_data_bytes} data bytes")
    return tuple(shape), source_type, start, end


def _are_sizes(value: Any, most: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= most and all(
        type(item) is int and 0 <= item < 1 << 63 for item in value)


def _refuse_overlaps(path: Path, tensors: dict[str, StoredTensor], data: Any) -> None:
    base = data.__array_interface__["data"][0]
    previous_name, previous_end = "", 0
    for start, end, name in sorted(_extents(tensors, base)):
        if start < previous_end:
            raise ModelError(f"{path}: tensors {previous_name} and {name} overlap at data byte {start}")
        previous_name, previous_end = name, end


def _extents(tensors: dict[str, StoredTensor], base: int) -> Iterator[tuple[int, int, str]]:
    for tensor in tensors.values():
        if tensor.raw.size:
            start = tensor.raw.__array_interface__["data"][0] - base
            yield start, start + tensor.raw.size, tensor.name

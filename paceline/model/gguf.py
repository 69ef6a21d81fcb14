"""GGUF v2 and v3 headers over a memory map, little-endian only.

Why not the gguf package's reader: it takes 2.2 s for the header of SmolLM2 (a numpy view for every one of the 98,000
strings in the vocabulary), this one a few hundredths. The values of tensors are never touched here.

A model may be split into files NAME-00001-of-00003.gguf; any of them stands for all. The first one's metadata counts.

A header is untrusted: every count and length is checked against the bytes that are left before anything is allocated,
so that memory stays proportional to the file. All failures are ModelErrors naming file, field and number.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..ops.dequantize import BLOCKS
from .fields import Fields
from .stored import StoredTensor, map_file, num_tensor_bytes

_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6
_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRUCTS = {value_type: struct.Struct("<" + letter) for value_type, letter in _LETTERS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TYPE_NAMES = {    # ggml type ids; only those in dequantize.BLOCKS can be read
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}
_MAX_DIMENSIONS = 4
_LEAST_PAIR_BYTES = 13      # key length, value type, one byte of value
_LEAST_TENSOR_BYTES = 32    # name length, dimension count, one extent, type, offset


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """metadata holds scalars, strings, lists of strings and numpy arrays of numbers; tensors are keyed by name.

    paths: the file, or all parts of a split one, in order; metadata and path are the first one's."""

    paths: tuple[Path, ...]
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    header_sha256: str

    @property
    def path(self) -> Path:
        return self.paths[0]

    @property
    def fields(self) -> Fields:
        return Fields(self.metadata, str(self.path))


def read_gguf(path: Path) -> GGUFFile:
    """Reads the headers; tensors are views of the maps. ModelError unless the files are sound and of known types."""
    file = _read_file(path)
    num_parts = file.fields.integer("split.count", 1)
    return file if num_parts == 1 else _joined([_read_part(file, other, number, num_parts)
                                                for number, other in enumerate(_part_paths(path, num_parts))])


def _part_paths(path: Path, num_parts: int) -> list[Path]:
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[2]) != num_parts or num_parts < 1:
        raise ModelError(f"{path}: split.count={num_parts}: a part must be named NAME-00001-of-{num_parts:05}.gguf")
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{num_parts:05}.gguf") for number in range(1, num_parts + 1)]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path}: split.count={num_parts}: part {missing[0]}{more} is missing from the directory")
    return paths


def _read_part(given: GGUFFile, path: Path, number: int, num_parts: int) -> GGUFFile:
    part = given if path == given.path else _read_file(path)
    if part.fields.integer("split.count", 1) != num_parts or part.fields.integer("split.no") != number:
        raise part.fields.refuse("split.no", f"the file must be part {number} of {num_parts}, counted from 0")
    return part


def _joined(parts: list[GGUFFile]) -> GGUFFile:
    """One file with the tensors of all parts, and no word about the split left in its metadata."""
    first, tensors = parts[0], dict[str, StoredTensor]()
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelError(f"{part.path}: tensor name {name!r} appears in an earlier part as well")
            tensors[name] = tensor
    declared = first.fields.integer("split.tensors.count", len(tensors))
    if declared != len(tensors):
        raise first.fields.refuse("split.tensors.count", f"the {len(parts)} parts hold {len(tensors)} tensors")
    metadata = {name: value for name, value in first.metadata.items() if not name.startswith("split.")}
    digest = hashlib.sha256("".join(part.header_sha256 for part in parts).encode()).hexdigest()
    return GGUFFile(tuple(part.path for part in parts), first.version, metadata, tensors, digest)


def _read_file(path: Path) -> GGUFFile:
    mapped = map_file(path)
    cursor = _Cursor(mapped, path)
    version, num_tensors, num_pairs = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for index in range(num_pairs):
        key = cursor.string(f"key of metadata pair {index}")
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(key)
    entries = _read_tensor_entries(cursor, num_tensors)
    data_start = _data_start(cursor, metadata)
    tensors = {entry.name: _view(cursor, entry, data_start) for entry in entries}
    digest = hashlib.sha256(memoryview(mapped)[:cursor.offset]).hexdigest()
    return GGUFFile((path,), version, metadata, tensors, digest)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]      # row-major, outputs first
    source_type: str
    offset: int                 # from the start of the data


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    magic = cursor.take(4, "magic")
    if magic != b"GGUF":
        raise cursor.error(f"magic is {magic!r}, not b'GGUF'")
    version = cursor.u32("version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "; the file is big-endian, only little-endian is supported" if swapped in (2, 3) else ""
        raise cursor.error(f"version {version} is not 2 or 3{kind}")
    num_tensors, num_pairs = cursor.u64("tensor_count"), cursor.u64("metadata_kv_count")
    cursor.need(num_tensors * _LEAST_TENSOR_BYTES, f"tensor_count {num_tensors}")
    cursor.need(num_pairs * _LEAST_PAIR_BYTES, f"metadata_kv_count {num_pairs}")
    return version, num_tensors, num_pairs


def _read_tensor_entries(cursor: _Cursor, num_tensors: int) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    for index in range(num_tensors):
        name = cursor.string(f"name of tensor {index}")
        if name in entries:
            raise cursor.error(f"tensor name {name!r} appears twice")
        num_dimensions = cursor.u32(f"dimension count of {name}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise cursor.error(f"tensor {name}: {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
        extents = [cursor.u64(f"extent {axis} of {name}") for axis in range(num_dimensions)]
        type_id = cursor.u32(f"type of {name}")
        type_name = _TYPE_NAMES.get(type_id, f"number {type_id} (unknown)")
        if type_name not in BLOCKS:
            raise cursor.error(f"tensor {name}: type {type_name} is not supported; supported: {', '.join(BLOCKS)}")
        offset = cursor.u64(f"offset of {name}")
        entries[name] = _Entry(name, tuple(reversed(extents)), type_name, offset)
    return list(entries.values())


def _data_start(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = Fields(metadata, str(cursor.path)).integer("general.alignment", 32)
    if alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise cursor.error(f"general.alignment {alignment} is not a power of two from 8 to {1 << 20}")
    return -(-cursor.offset // alignment) * alignment


def _view(cursor: _Cursor, entry: _Entry, data_start: int) -> StoredTensor:
    num_bytes = num_tensor_bytes(entry.shape, entry.source_type)
    if num_bytes is None:
        raise cursor.error(f"tensor {entry.name}: rows of {entry.shape[-1]} values are no whole number of "
                           f"{entry.source_type} blocks of {BLOCKS[entry.source_type][0]}")
    if num_bytes == 0:
        raise cursor.error(f"tensor {entry.name}: shape {list(entry.shape)} is empty")
    start = data_start + entry.offset
    if start + num_bytes > cursor.end:
        raise cursor.error(f"tensor {entry.name}: offset {entry.offset} and {num_bytes} bytes end at byte "
                           f"{start + num_bytes}, past the end of the file ({cursor.end} bytes)")
    raw: NDArray[np.uint8] = np.frombuffer(cursor.mapped, np.uint8, num_bytes, start)
    return StoredTensor(entry.name, entry.shape, entry.source_type, raw)


class _Cursor:
    """Reads values one after another and refuses to pass the end of the file."""

    def __init__(self, mapped: mmap.mmap, path: Path) -> None:
        self.mapped = mapped
        self.path = path
        self.offset = 0
        self.end = len(mapped)

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.end - self.offset:
            raise self.error(f"{what}: needs {num_bytes} bytes at byte {self.offset}, "
                             f"the file has {self.end - self.offset} left")

    def take(self, num_bytes: int, what: str) -> bytes:
        self.need(num_bytes, what)
        self.offset += num_bytes
        return self.mapped[self.offset - num_bytes : self.offset]

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def string(self, what: str) -> str:
        raw = self.take(self.u64(f"length of {what}"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what}: {len(raw)} bytes are not valid UTF-8: {error.reason}") from None

    def value(self, key: str) -> Any:
        value_type = self.u32(f"type of {key}")
        if value_type == _STRING:
            return self.string(key)
        if value_type == _ARRAY:
            return self._array(key)
        if value_type not in _STRUCTS:
            raise self.error(f"{key}: value type {value_type} is unknown")
        layout = _STRUCTS[value_type]
        (value,) = layout.unpack(self.take(layout.size, key))
        if value_type == _BOOL:
            return value != 0
        # The shortest decimal that rounds to the same float32: 1e-05, not 9.999999747378752e-06, as config.json says.
        return float(str(np.float32(value))) if value_type == _FLOAT32 else value

    def _array(self, key: str) -> Any:
        item_type, count = self.u32(f"item type of {key}"), self.u64(f"length of {key}")
        if item_type == _STRING:
            return self._strings(key, count)
        if item_type not in _LETTERS:
            raise self.error(f"{key}: array item type {item_type} is not supported")
        dtype = np.dtype("<" + _LETTERS[item_type])
        return np.frombuffer(self.take(count * dtype.itemsize, f"{key} of {count} items"), dtype)

    def _strings(self, key: str, count: int) -> list[str]:
        """The hot loop: one string costs two slices and no function call of ours."""
        self.need(count * 8, f"{key} of {count} strings")
        mapped, offset, end, length_at = self.mapped, self.offset, self.end, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + length_at(mapped, offset)[0]
                if offset > end:
                    raise self.error(f"{key}[{len(strings)}]: ends at byte {offset}, past the end of the file ({end})")
                strings.append(mapped[start:offset].decode())
        except struct.error:
            raise self.error(f"{key}[{len(strings)}]: its length lies past the end of the file ({end})") from None
        except UnicodeDecodeError as error:
            raise self.error(f"{key}[{len(strings)}]: not valid UTF-8: {error.reason}") from None
        self.offset = offset
        return strings

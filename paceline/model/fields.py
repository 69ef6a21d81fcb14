"""Typed reading of untrusted key-value data (config.json, GGUF metadata). Every failure names the source and the field.

Knows nothing of models: families.py says which fields exist and what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelError

_MISSING = object()


class Fields:
    """A mapping with typed getters. `where` is how messages call the source, e.g. the path of the file.

    A field whose value is null counts as absent. Getters without a default refuse an absent field.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: Any = _MISSING) -> int:
        value = self._get(name, default, (int,), "an integer")
        if value is not None and not -(2**63) <= value < 2**63:     # what may follow is arithmetic in floats
            raise self.refuse(name, "is out of range")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self._get(name, default, (int, float), "a number")
        return float(value) if -1e300 < value < 1e300 else float("inf")

    def text(self, name: str, default: Any = _MISSING) -> str:
        return self._get(name, default, (str,), "a string")

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        return self._get(name, default, (bool,), "true or false")

    def mapping(self, name: str) -> Fields:
        """A nested mapping; empty when absent."""
        return Fields(self._get(name, {}, (dict,), "an object"), f"{self.where}: {name}")

    def integers(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them; empty when absent."""
        value = self.values.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        for item in items:
            if not isinstance(item, int) or isinstance(item, bool):
                raise ModelError(f"{self.where}: {name} must be an integer or a list of them, got {_shorten(value)}")
        return tuple(items)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers; empty when absent."""
        items = self._get(name, [], (list,), "a list of numbers")
        for item in items:
            if not isinstance(item, int | float) or isinstance(item, bool):
                raise ModelError(f"{self.where}: {name} must be a list of numbers, got {_shorten(items)}")
        return tuple(float(item) for item in items)

    def refuse(self, name: str, reason: str) -> ModelError:
        """The error that says this field's value cannot be served; the caller raises it."""
        return ModelError(f"{self.where}: {name}={_shorten(self.values.get(name))}: {reason}")

    def _get(self, name: str, default: Any, types: tuple[type, ...], wanted: str) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _MISSING:
                raise ModelError(f"{self.where}: {name} is missing")
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ModelError(f"{self.where}: {name} must be {wanted}, got {_shorten(value)}")
        return value


def read_json(path: Path) -> Any:
    """The parsed file. ModelError when it is missing, not UTF-8, cut, or a Git LFS pointer."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    refuse_lfs_pointer(path, raw)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({len(raw)} bytes): {error}") from error


def read_json_fields(path: Path) -> Fields:
    """A JSON object as Fields; the same errors, and one when it is not an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {_shorten(value)}")
    return Fields(value, str(path))


def refuse_lfs_pointer(path: Path, head: bytes) -> None:
    if head.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")


def _shorten(value: Any) -> str:
    shown = repr(value) if not hasattr(value, "shape") else f"array of {value.size}"
    return shown if len(shown) <= 80 else shown[:77] + "..."

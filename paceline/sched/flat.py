"""Frozen dataclasses that cross to another process with every step, pickled as one call with their values.

What `dataclass(frozen=True, slots=True)` generates for pickling looks every field up by name on both sides, and its
constructor hands each value through object.__setattr__: most of the time that a step's news takes between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")
_SETTERS: dict[type[Any], tuple[Callable[[Any, Any], None], ...]] = {}


def pickled_flat(kind: type[T]) -> type[T]:
    """A decorator above @dataclass(slots=True)."""
    if hasattr(kind, "__post_init__"):
        raise TypeError(f"{kind.__name__} checks its values when it is made, and a copy would be made without")
    names = tuple(kind.__dataclass_fields__)    # type: ignore[attr-defined]
    values_of: Callable[[T], tuple[Any, ...]] = attrgetter(*names)
    _SETTERS[kind] = tuple(getattr(kind, name).__set__ for name in names)

    def reduce(self: T) -> tuple[Callable[..., T], tuple[Any, ...]]:
        return _rebuilt, (kind, *values_of(self))

    kind.__reduce__ = reduce    # type: ignore[method-assign, assignment]
    return kind


def _rebuilt(kind: type[T], *values: Any) -> T:
    value = object.__new__(kind)
    for set_field, one in zip(_SETTERS[kind], values, strict=True):
        set_field(value, one)
    return value

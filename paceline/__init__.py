"""Paceline: an LLM serving engine whose schedule can be switched, watched, replayed and measured."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    # The public names resolve on first use, so that `import paceline.request` costs nothing.
    if name == "LLM":
        from .build import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

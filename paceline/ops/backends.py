"""Which numeric path serves: the compiled kernels, or the numpy reference when named or when nothing else is there."""

from __future__ import annotations

from collections.abc import Callable

from ..config import ISA_NAMES
from ..errors import ConfigError
from .cpu import MISSING, CpuBackend, load_kernels
from .interface import Backend
from .numpy_ops import NumpyBackend

SLOW = (f"{MISSING}: no C++ compiler was found when this package was installed. Serving with the numpy reference, "
        "which is correct and some hundred times slower. Install a compiler and reinstall to get the kernels.")


def make_backend(isa: str, num_threads: int | None, warn: Callable[[str], None], runs_ahead: bool = False) -> Backend:
    """The backend of a path. "auto" without compiled kernels falls back to numpy, and tells `warn` so, once."""
    if isa not in ISA_NAMES:
        raise ConfigError(f"isa={isa!r} is unknown; choose from {list(ISA_NAMES)}")
    if isa == "numpy":
        if num_threads is not None:
            raise ConfigError(f"num_threads={num_threads} has no effect with isa='numpy'; leave it out")
        return NumpyBackend()
    if isa == "auto" and load_kernels() is None:
        warn(SLOW)
        return NumpyBackend()
    return CpuBackend(isa, num_threads, runs_ahead)

"""The C++ backend: a thin binding on `paceline._kernels`. Its program runs a whole step in one call, without the GIL.

The extension may be missing (no compiler at install); this module can be imported all the same and says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, InvariantError, ModelError
from .interface import ForwardBatch, KVSpec, PackedLinear, SourceTensor, StepOutput, stacked
from .machine import usable_cores
from .program import Program

NO_OUTPUT = -1    # what the extension calls a node without one
MISSING = "the compiled kernels (paceline._kernels) are missing"


def load_kernels() -> Any | None:
    """The extension module; None where it was not built. One that is there but does not load is an error."""
    try:
        return importlib.import_module("paceline._kernels")
    except ModuleNotFoundError:
        return None


def available_paths() -> list[str]:
    """Instruction-set paths that run on this machine, best first; none without the compiled kernels."""
    kernels = load_kernels()
    return [] if kernels is None else list(kernels.paths())


def cpu_features() -> list[str]:
    """Names of the processor features the kernels look for and found."""
    kernels = load_kernels()
    return [] if kernels is None else [name for name, is_there in kernels.cpu_features().items() if is_there]


class CpuBackend:
    """Kernels of one instruction-set path. path "auto" takes the best one this machine runs."""

    def __init__(self, path: str = "auto", num_threads: int | None = None, runs_ahead: bool = False) -> None:
        """runs_ahead: of what it binds, the next step begins before it is asked for, where it is known."""
        kernels = load_kernels()
        if kernels is None:
            raise ConfigError(f"isa={path!r}: {MISSING}; choose numpy, or install a compiler and reinstall")
        paths = list(kernels.paths())    # best first
        if path != "auto" and path not in paths:
            raise ConfigError(f"isa={path!r} does not run on this machine; choose from {['auto', *paths, 'numpy']}")
        self._kernels: Any = kernels
        self._path = paths[0] if path == "auto" else path
        self.num_threads = usable_cores() if num_threads is None else num_threads
        self.runs_ahead = runs_ahead and self.num_threads > 1

    @property
    def path_name(self) -> str:
        return f"cpu-{self._path}"

    def pack(self, sources: Sequence[SourceTensor], form: str) -> PackedLinear:
        num_inputs = sources[0].num_inputs
        try:
            payload = self._kernels.pack(form, num_inputs, [(s.source_type, s.raw, s.row_order) for s in sources],
                                         self.num_threads)
        except ValueError as error:
            raise ModelError(f"{', '.join(s.name for s in sources)}: {error}") from error
        return PackedLinear(form, sum(s.num_outputs for s in sources), num_inputs, payload.num_bytes, payload,
                            stacked(sources))

    def unpack(self, packed: PackedLinear) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self._kernels.unpack(packed.payload)
        return values

    def calibration(self) -> Any:
        """The machine's own limits on this path and these threads: paceline._kernels.Calibration."""
        return self._kernels.Calibration(self._path, self.num_threads)

    def bind(self, program: Program, kv: KVSpec) -> CpuRunner:
        buffers = [(b.buffer_id, b.rows, b.width) for b in program.buffers]
        nodes = [(n.verb, list(n.inputs), NO_OUTPUT if n.output is None else n.output, list(n.weights), dict(n.attrs))
                 for n in program.nodes]
        weights = {name: w.payload if isinstance(w, PackedLinear) else w for name, w in program.weights.items()}
        try:
            return CpuRunner(self._kernels.Runner(
                self._path, self.num_threads, buffers, nodes, weights, program.num_heads, program.num_kv_heads,
                program.head_dim, program.vocab_size, asdict(kv), self.runs_ahead))
        except ValueError as error:
            raise ConfigError(f"the compiled kernels cannot run this model: {error}") from error
        except MemoryError as error:
            raise ConfigError(f"no memory for a KV pool of {kv.num_blocks * kv.bytes_per_block} bytes") from error


class CpuRunner:
    """A program bound to its weights, its KV memory and its threads, all inside the extension."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def step(self, batch: ForwardBatch, wants_logits: bool = False) -> StepOutput:
        draw = batch.sampling
        try:
            return StepOutput(*self._runner.step(
                batch.token_ids, batch.positions, batch.row_starts, batch.block_tables, batch.wanted, batch.copies,
                draw.temperature, draw.top_k, draw.top_p, draw.seed, draw.prompt_index, draw.choice_index,
                draw.position, draw.wants_logprob, draw.extras, wants_logits))
        except ValueError as error:    # an index out of range; nothing has run
            raise InvariantError(f"the step's arrays are wrong: {error}") from error

    def poison(self, block_ids: NDArray[np.int32]) -> None:
        """Fills blocks with NaN, so that a test notices whoever reads them."""
        self._runner.poison(block_ids)

    def profile(self, enable: bool) -> None:
        """Starts, from nothing, or stops the timers of the program's operations."""
        self._runner.profile(enable)

    def profile_report(self) -> list[tuple[str, int, float]]:
        """(operation, times it ran, seconds in all) in the order of the program. An operation is a node, or a run of
        nodes that work row by row; those of one name are added up."""
        report: list[tuple[str, int, float]] = self._runner.profile_report()
        return report

    @property
    def num_joined(self) -> int:
        """Steps that were under way when they were asked for."""
        return int(self._runner.num_joined)

    def close(self) -> None:
        self._runner.close()

"""`paceline bench kernels`: what each operation of a model's step costs, beside what the machine can do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from ..flags import plain_command, put
from . import kernels
from .kernels import Cell, KernelBench, Machine


def add(commands: Any) -> None:
    """Under the name "bench kernels", of which cli.py makes one word: bench takes a target there, with other flags."""
    help = ("time, GB/s, GOP/s and share of what this machine can do of every operation of a model's step, by the "
            "tokens in it; weights come from memory, and the memory's speed is read before each pass")
    command = plain_command(commands, "bench kernels", _run, help)
    command.add_argument("--model", default="smollm2", metavar="MODEL",
                         help="as `paceline serve` takes it (default: smollm2)")
    command.add_argument("--rows", type=_numbers, default=kernels.ROWS, metavar="N,N,...",
                         help=f"tokens of a step; above {kernels.MAX_DECODE_ROWS} they are one prompt's "
                              f"(default: {_text(kernels.ROWS)})")
    command.add_argument("--contexts", type=_numbers, default=kernels.CONTEXTS, metavar="N,N,...",
                         help=f"keys that attention sees (default: {_text(kernels.CONTEXTS)})")
    command.add_argument("--dtype", type=lambda text: tuple(text.split(",")), default=("auto",), metavar="DTYPE,...",
                         help="packed forms of the weights, as --dtype of serve has them; of the second and later ones "
                              "linears only (default: auto)")
    command.add_argument("--kv-dtype", default="bf16", metavar="bf16|f32",
                         help="number format of the cache (default: bf16)")
    command.add_argument("--path", "--isa", dest="isa", default="auto", metavar="PATH",
                         help="instruction-set path: auto, portable, avx2 or avx512 (default: auto, the best)")
    command.add_argument("--threads", "--num-threads", dest="num_threads", type=int, metavar="N",
                         help="compute threads (default: one per usable core)")
    command.add_argument("--passes", type=int, default=kernels.NUM_PASSES, metavar="N",
                         help=f"times each operation is timed (default: {kernels.NUM_PASSES})")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(f"must be whole numbers of at least 1 with commas between them, got {text!r}")
    return tuple(map(int, parts))


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.passes < 1:
        raise ConfigError(f"passes must be at least 1, got {arguments.passes}")
    configs = [ModelConfig(model=arguments.model, dtype=dtype, kv_dtype=arguments.kv_dtype, isa=arguments.isa,
                           num_threads=arguments.num_threads) for dtype in arguments.dtype]
    facts, cells = _measure(configs, arguments.rows, arguments.contexts, arguments.passes)
    put(json.dumps(facts) if arguments.json else _page(facts, cells))
    return 0


def _measure(configs: list[ModelConfig], rows: tuple[int, ...], contexts: tuple[int, ...],
             num_passes: int) -> tuple[dict[str, Any], list[Cell]]:
    from ..build import load_model
    from ..info import bench_model
    from ..ops.cpu import CpuBackend

    if configs[0].isa == "numpy":
        raise ConfigError("bench kernels times the compiled kernels; isa='numpy' has none")
    backend = CpuBackend(configs[0].isa, configs[0].num_threads)
    machine = Machine(backend.calibration())
    cells: list[Cell] = []
    fingerprints = []
    for config in configs:
        loaded = load_model(config)
        fingerprints.append(loaded.fingerprint)
        bench = KernelBench(bench_model(loaded), machine, num_passes)
        cells += _cells(bench, rows, contexts if config is configs[0] else None)
    facts = {"model": configs[0].model, "fingerprints": fingerprints, "threads": backend.num_threads,
             "passes": num_passes, "calibration": machine.facts(), "definition": kernels.DEFINITION,
             "cells": [{name: getattr(cell, name) for name in Cell.__slots__} for cell in cells]}
    return facts, cells


def _cells(bench: KernelBench, rows: tuple[int, ...], contexts: tuple[int, ...] | None) -> Iterator[Cell]:
    """Without contexts: what depends on the form of the weights."""
    for num_rows in rows:
        yield from bench.linears(num_rows)
        yield from bench.tail(num_rows)
        if contexts is not None:
            yield from bench.rows(num_rows)
            for num_keys in contexts:
                yield from bench.attention(num_rows, num_keys)
            yield from bench.copies(num_rows)


def _page(facts: dict[str, Any], cells: list[Cell]) -> str:
    machine = f"{facts['threads']} threads; {kernels.calibration_line(facts['calibration'])}"
    return "\n".join([*facts["fingerprints"], machine, "", kernels.table(cells), "", facts["definition"]])

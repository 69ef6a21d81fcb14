"""The machine that a measurement ran on, and a calibration that tells whether it was the same all along.

The calibration is none of the engine's work: it reads memory and multiplies matrices with numpy, in a fraction of a
second, before each round. Virtual machines change between states of memory and clock; what changes here has changed for
every contestant.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..ops.machine import available_memory_bytes, usable_cores

NUM_TRIES = 5
MEGABYTES = 256
MATRIX = 1024
CALIBRATION = (f"best of {NUM_TRIES}: reading {MEGABYTES} MB with a thread a core, and a product of f32 matrices of "
               f"{MATRIX} x {MATRIX} by numpy, before each round")


def machine_facts() -> dict[str, Any]:
    memory = available_memory_bytes()
    return {"processor": processor_name(), "cores": usable_cores(), "system": platform.platform(terse=True),
            "python": platform.python_version(),
            "memory available": None if memory is None else f"{memory / 1e9:.1f} GB"}


def processor_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Of the checkout that this package runs from; None where it is installed, or git is not there."""
    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if git("ls-files", Path(__file__).name) == "":
            return None
        return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def calibrate() -> dict[str, float]:
    array = np.ones(MEGABYTES << 18, np.float32)
    parts = np.array_split(array, usable_cores())
    left = np.ones((MATRIX, MATRIX), np.float32)
    with ThreadPoolExecutor(len(parts)) as threads:
        reading = _best(lambda: list(threads.map(np.maximum.reduce, parts)))
    return {"memory_gb_per_second": round(array.nbytes / reading / 1e9, 2),
            "gflop_per_second": round(2 * MATRIX**3 / _best(lambda: left @ left) / 1e9, 1)}


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(NUM_TRIES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def calibration_facts(lines: Sequence[dict[str, float]]) -> dict[str, Any]:
    """For the set-up: the line of each round, and what they mean."""
    said = [f"{line['memory_gb_per_second']:g} GB/s, {line['gflop_per_second']:g} GFLOP/s" for line in lines]
    return {"each round": "; ".join(said), "how": CALIBRATION, "rounds": list(lines)}

"""Memory and time that loading takes, from real files: the table of docs/benchmarks.md.

    python scripts/bench_load.py [--shape dummy:qwen2.5-0.5b] [--folder DIR]

Writes random weights of the shape as a bf16 directory, as AWQ, GPTQ and FP8 ones and as GGUF files, and loads each in a
process of its own. Definitions:
  packed      bytes of the packed matrices and tables, as `paceline info` has them
  peak anon   greatest RssAnon (/proc/self/status, sampled every 5 ms by a thread) while load_model runs, less its value
              before: the interpreter, the libraries and the opened file (tokenizer, header) are the baseline
  over        peak anon less packed: what loading takes beside its result. The bound is 10% of packed + 100 MB
  VmHWM       the process's greatest resident size, mapped pages of the file included
  cold, warm  seconds of load_model with the file's pages dropped from the page cache first (POSIX_FADV_DONTNEED), and
              with them there. Cold depends on the disk alone where that is slow
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HF_TYPES, GGUF_TYPES = ("BF16", "awq", "gptq", "fp8"), ("Q4_1", "Q8_0")
RUNS = [("BF16", "auto"), ("BF16", "int8"), ("BF16", "int4"), ("Q4_1", "auto"), ("Q4_1", "int8"), ("Q8_0", "auto"),
        ("awq", "auto"), ("gptq", "auto"), ("fp8", "auto")]
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="dummy:qwen2.5-0.5b", help="a dummy: model (default: dummy:qwen2.5-0.5b)")
    parser.add_argument("--folder", type=Path, help="where the files go and stay (default: a temporary folder)")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
    elif arguments.folder:
        table(arguments.shape, arguments.folder)
    else:
        with tempfile.TemporaryDirectory() as folder:
            table(arguments.shape, Path(folder))


def table(shape: str, folder: Path) -> None:
    print("| file | dtype | file MB | packed MB | peak anon MB | over MB | bound MB | VmHWM MB | cold s | warm s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind, dtype in RUNS:
        path = written(shape, folder, kind)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        for file in files:
            drop_from_cache(file)
        cold, warm = in_a_process(path, dtype), in_a_process(path, dtype)
        packed, peak = warm["packed"], max(cold["peak"], warm["peak"])
        sizes = (sum(file.stat().st_size for file in files), packed, peak, peak - packed, packed * 0.1 + 100 * MB,
                 max(cold["hwm"], warm["hwm"]))
        shown = " | ".join(f"{size / MB:,.0f}" for size in sizes)
        print(f"| {kind} | {dtype} | {shown} | {cold['seconds']:.2f} | {warm['seconds']:.2f} |", flush=True)


def written(shape: str, folder: Path, kind: str) -> Path:
    """In a process of its own, so that nothing of it stays in ours."""
    path = folder / (kind if kind in HF_TYPES else f"{kind}.gguf")
    if not path.exists():
        subprocess.run([sys.executable, "-m", "tests.golden.write_model", shape, path, "--type", kind], check=True)
    return path


def drop_from_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def in_a_process(path: Path, dtype: str) -> dict[str, Any]:
    run = subprocess.run([sys.executable, __file__, "--measure", path, dtype], stdout=subprocess.PIPE, check=True)
    measured: dict[str, Any] = json.loads(run.stdout)
    return measured


def measure(model: str, dtype: str) -> dict[str, Any]:
    from paceline.build import load_model, opened
    from paceline.config import ModelConfig
    from paceline.model.decoder import weights_bytes

    config = ModelConfig(model=model, dtype=dtype)
    opened(config.model, config.revision)
    baseline = status("RssAnon")
    with Sampler() as sampler:
        started_at = time.perf_counter()
        loaded = load_model(config)
        seconds = time.perf_counter() - started_at
    return {"packed": weights_bytes(loaded.program), "peak": sampler.greatest - baseline, "hwm": status("VmHWM"),
            "seconds": seconds}


class Sampler:
    """The greatest RssAnon seen. A peak shorter than the interval can be missed; packing a matrix takes longer."""

    def __enter__(self) -> Sampler:
        self.greatest, self._is_over = 0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.005):
            self.greatest = max(self.greatest, status("RssAnon"))
        self.greatest = max(self.greatest, status("RssAnon"))


def status(name: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


if __name__ == "__main__":
    main()

"""Limits of control groups count, whichever level and version sets them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.ops import backends
from paceline.ops.cpu import load_kernels
from paceline.ops.machine import available_memory_bytes, cgroup_directories, usable_cores
from paceline.ops.numpy_ops import NumpyBackend

GIB = 1 << 30


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("_", ".", 1)).write_text(text + "\n")


def meminfo(tmp_path: Path, num_bytes: int) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {num_bytes // 1024} kB\n")
    return path


def test_without_limits_the_affinity_counts(tmp_path: Path) -> None:
    write(tmp_path, cpu_max="max 100000")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("199999 100000", 1)])
def test_a_quota_is_rounded_down_to_at_least_one(tmp_path: Path, quota: str, cores: int) -> None:
    write(tmp_path, cpu_max=quota)
    assert usable_cores(tmp_path) == cores


def test_version_one_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 1


def test_our_group_and_its_ancestors_are_found(tmp_path: Path) -> None:
    membership = tmp_path / "self"
    membership.write_text("5:cpu,cpuacct:/a\n3:memory:/b/c\n0::/x/y\n")
    found = set(cgroup_directories(tmp_path, membership))
    assert {tmp_path, tmp_path / "x", tmp_path / "x/y", tmp_path / "cpu/a", tmp_path / "memory/b",
            tmp_path / "memory/b/c"} <= found


def test_the_smaller_of_machine_and_group_is_available(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path, meminfo(tmp_path, 8 * GIB)) == 8 * GIB
    write(tmp_path, memory_max=str(2 * GIB), memory_current=str(GIB), memory_stat="anon 1\ninactive_file 4096")
    assert available_memory_bytes(tmp_path, meminfo(tmp_path, 8 * GIB)) == GIB + 4096
    assert available_memory_bytes(tmp_path, meminfo(tmp_path, GIB // 2)) == GIB // 2
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") is None


def test_an_unknown_path_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"avx9.*portable.*numpy"):
        backends.make_backend("avx9", None, warn=pytest.fail)


def test_numpy_on_request_is_silent() -> None:
    assert isinstance(backends.make_backend("numpy", None, warn=pytest.fail), NumpyBackend)


def test_missing_kernels_fall_back_loudly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.ops.backends.load_kernels", lambda: None)
    monkeypatch.setattr("paceline.ops.cpu.load_kernels", lambda: None)
    warnings: list[str] = []
    assert backends.make_backend("auto", None, warnings.append).path_name == "numpy"
    assert len(warnings) == 1 and "slower" in warnings[0] and "compiler" in warnings[0]
    with pytest.raises(ConfigError, match="compiled kernels"):
        backends.make_backend("portable", None, warnings.append)


@pytest.mark.skipif(load_kernels() is None, reason="the extension is not built")
def test_compiled_kernels_are_taken_silently() -> None:
    assert backends.make_backend("auto", 1, warn=pytest.fail).path_name.startswith("cpu-")

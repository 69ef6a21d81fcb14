"""What this process may use of the machine: cores and memory, the limits of its control groups included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cores(root: Path = CGROUP_ROOT) -> int:
    """Cores the scheduler grants us; a fractional CPU quota is rounded down, since a throttled thread stalls all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for directory in cgroup_directories(root) if (quota := _cpu_quota(directory)) is not None]
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def available_memory_bytes(root: Path = CGROUP_ROOT, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that can still be taken without swapping or hitting a limit; None where nothing tells."""
    rooms = [room for directory in cgroup_directories(root) if (room := _memory_room(directory)) is not None]
    if (free := _mem_available(meminfo)) is not None:
        rooms.append(free)
    return min(rooms, default=None)


def cgroup_directories(root: Path, membership: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """Our control group and its ancestors, version 2 and the cpu and memory controllers of version 1."""
    yield from (root, root / "cpu", root / "memory")
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        for name in {"cpu", "memory"} & set(controllers.split(",")) or ({""} if not controllers else set()):
            directory = (root / name) / path.strip("/")
            while directory != root / name and root in directory.parents:
                yield directory
                directory = directory.parent


def _cpu_quota(directory: Path) -> float | None:
    numbers = _text(directory / "cpu.max").split()
    numbers = numbers or [_text(directory / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    if all(number.isdigit() and int(number) > 0 for number in numbers):
        return int(numbers[0]) / int(numbers[1])
    return None    # "max", -1 or no such file


def _memory_room(directory: Path) -> int | None:
    """Limit minus what is in use, not counting file pages that the kernel would give back."""
    for limit_name, usage_name in (("memory.max", "memory.current"),
                                   ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, usage = _text(directory / limit_name).strip(), _text(directory / usage_name).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < 1 << 60:
            return max(0, int(limit) - int(usage) + _reclaimable(directory))
    return None


def _reclaimable(directory: Path) -> int:
    stat = dict(line.split(" ", 1) for line in _text(directory / "memory.stat").splitlines() if " " in line)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _mem_available(meminfo: Path) -> int | None:
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

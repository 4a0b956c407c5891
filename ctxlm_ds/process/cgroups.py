"""CPU cores and memory that this machine has and the cgroups of this process (version 1 or 2) allow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
SHARED_MOUNTS = {"cpu": "cpu,cpuacct"}  # folders in which version 1 may mount a controller together with others


def available_cores(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int:
    """Count the cores this process may run on: its affinity, cut by the CPU quota of its cgroups."""
    quotas = (quota for _, quota in _limits("cpu", _quota, root, own))
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def memory_left(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> dict[str, int]:
    """Measure the bytes that each memory limit of this process still leaves, by the path of its cgroup."""
    return dict(_limits("memory", _memory_left, root, own))


def available_memory(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int:
    """Measure the bytes that this process can still take: the machine's, cut by its cgroups."""
    import psutil

    return min([psutil.virtual_memory().available, *memory_left(root, own).values()])


def read_text(path: Path) -> str:
    """Read a file of the kernel; empty if it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _limits(controller: str, read: Callable[[Path], T | None], root: Path, own: Path) -> Iterator[tuple[str, T]]:
    """Read the limits from each cgroup up to the root; in a container its path may not exist below the mount."""
    for line in read_text(own).splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (controller, SHARED_MOUNTS.get(controller, controller), controllers) if controllers else ("",)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in dict.fromkeys(mounts):
            for depth in range(len(parts), -1, -1):
                limit = read(root.joinpath(mount, *parts[:depth]))
                if limit is not None:
                    yield "/" + "/".join(parts[:depth]), limit


def _quota(folder: Path) -> float | None:
    words = read_text(folder / "cpu.max").split()
    if len(words) != 2:
        words = [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota, period = float(words[0]), float(words[1])
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory_left(folder: Path) -> int | None:
    """Count the bytes below the limit, file cache that can go taken as free; None without a limit."""
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, usage = (read_text(folder / name).strip() for name in (limit_name, usage_name))
        if limit.isdigit() and usage.isdigit():
            facts = dict(line.split(" ", 1) for line in read_text(folder / "memory.stat").splitlines() if " " in line)
            cache = sum(int(facts.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
            return max(0, int(limit) - int(usage) + cache)
    return None

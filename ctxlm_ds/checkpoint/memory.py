"""Memory that this process could still take: the machine's, and what the limits of its cgroups leave.

In: /proc and /sys/fs/cgroup (version 1 or 2). Out: bytes, and whether the ranks of each machine fit into them.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
USABLE_SHARE = 0.8
"""Of what is available: data workers and evaluations take some too, later."""


@dataclass(frozen=True)
class MemoryNeed:
    """What one rank wants to take, and the places that it comes out of."""

    needed_bytes: int
    available_bytes: dict[str, int]
    """By name of the place: a machine, a cgroup with a limit. Ranks with the same name share it."""


def memory_need(
    needed_bytes: int, meminfo: Path = MEMINFO, own_cgroups: Path = OWN_CGROUPS, root: Path = CGROUP_ROOT
) -> MemoryNeed:
    """This rank's need beside what is available to it now."""
    host = socket.gethostname()
    available = {}
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available[host] = int(value.split()[0]) * 1024
    for line in _read(own_cgroups).splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers in ("", "memory"):
            for name, left_bytes in _left_up(root / controllers, path).items():
                available[f"{host}, cgroup {name}"] = left_bytes
    return MemoryNeed(needed_bytes, available)


def find_shortage(needs: Sequence[MemoryNeed]) -> str | None:
    """Where the ranks together want more than there is, in words; None where all fit."""
    wanted: dict[str, int] = {}
    available: dict[str, int] = {}
    for need in needs:
        for place, bytes_there in need.available_bytes.items():
            wanted[place] = wanted.get(place, 0) + need.needed_bytes
            available[place] = min(bytes_there, available.get(place, bytes_there))
    for place, wanted_bytes in wanted.items():
        if wanted_bytes > available[place] * USABLE_SHARE:
            return f"{wanted_bytes / 1e9:.1f} GB wanted, {available[place] / 1e9:.1f} GB available on {place}"
    return None


def _left_up(base: Path, path: str) -> dict[str, int]:
    """What limits leave, from the cgroup up to the root; in a container its path may not exist below the mount."""
    left = {}
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = base.joinpath(*parts[:depth])
        bytes_left = _left(folder)
        if bytes_left is not None:
            left["/" + "/".join(parts[:depth])] = bytes_left
    return left


def _left(folder: Path) -> int | None:
    """Bytes below the limit, file cache that can go counted as free; None without a limit."""
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            cache = 0
            for line in _read(folder / "memory.stat").splitlines():
                name, _, value = line.partition(" ")
                if name in (f"{prefix}inactive_file", f"{prefix}active_file"):
                    cache += int(value)
            return max(0, int(limit) - int(usage) + cache)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""

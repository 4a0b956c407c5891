"""How many threads a rank may use: the cores it has, shared with the other ranks of its node."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def available_cores(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int:
    """Cores this process may run on: its affinity, cut by the CPU quota of its cgroup (version 1 or 2)."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota(root, own)
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def cgroup_quota(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> float | None:
    """Smallest CPU quota, in cores, of this process's cgroup and those above it; None without a limit."""
    quotas = []
    for line in _read(own).splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            bases = [root]
        elif "cpu" in controllers.split(","):
            bases = [root / "cpu", root / "cpu,cpuacct", root / controllers]
        else:
            continue
        for base in bases:
            quotas += _quotas_up(base, path)
    return min(quotas, default=None)


def _quotas_up(base: Path, path: str) -> list[float]:
    """Quotas from the cgroup up to the root; in a container its path may not exist below the mounted root."""
    found = []
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        quota = _quota(base.joinpath(*parts[:depth]))
        if quota is not None:
            found.append(quota)
    return found


def _quota(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    if len(words) != 2:
        words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota, period = float(words[0]), float(words[1])
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def threads_per_rank(cores: int, local_world_size: int, environ: Mapping[str, str]) -> int:
    """Threads for one rank.

    OMP_NUM_THREADS counts where a person or DeepSpeed's --bind_cores_to_rank set it; the 1 that torchrun sets by
    itself does not. A task that srun bound to its own cores (SLURM_CPUS_PER_TASK of them) does not share them.
    """
    wanted = environ.get("OMP_NUM_THREADS", "")
    set_by_torchrun = wanted == "1" and "TORCHELASTIC_RUN_ID" in environ and local_world_size > 1
    if wanted.isdigit() and int(wanted) > 0 and not set_by_torchrun:
        return int(wanted)
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdigit() and cores <= int(per_task):
        return cores
    return max(1, cores // max(1, local_world_size))

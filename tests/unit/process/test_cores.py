"""Threads of a rank: affinity, cgroup quotas of both versions, and settings of launchers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ctxlm_ds.process.cores import available_cores, cgroup_quota, threads_per_rank


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    _write(tmp_path / "own", "0::/slurm/job_7/step_0\n")
    root = tmp_path / "cgroup"
    assert cgroup_quota(root, tmp_path / "own") is None
    _write(root / "slurm" / "cpu.max", "max 100000\n")
    assert cgroup_quota(root, tmp_path / "own") is None
    _write(root / "slurm" / "job_7" / "cpu.max", "350000 100000\n")
    _write(root / "slurm" / "job_7" / "step_0" / "cpu.max", "800000 100000\n")
    assert cgroup_quota(root, tmp_path / "own") == 3.5


def test_version_2_in_a_container_whose_path_is_outside(tmp_path: Path) -> None:
    _write(tmp_path / "own", "0::/../../docker/abc\n")
    _write(tmp_path / "cgroup" / "cpu.max", "150000 100000\n")
    assert cgroup_quota(tmp_path / "cgroup", tmp_path / "own") == 1.5


def test_version_1(tmp_path: Path) -> None:
    _write(tmp_path / "own", "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/y\n")
    folder = tmp_path / "cgroup" / "cpu,cpuacct" / "docker" / "abc"
    _write(folder / "cpu.cfs_period_us", "100000\n")
    _write(folder / "cpu.cfs_quota_us", "-1\n")
    assert cgroup_quota(tmp_path / "cgroup", tmp_path / "own") is None
    _write(folder / "cpu.cfs_quota_us", "200000\n")
    assert cgroup_quota(tmp_path / "cgroup", tmp_path / "own") == 2.0


def test_a_quota_below_one_core_still_leaves_a_thread(tmp_path: Path) -> None:
    _write(tmp_path / "own", "0::/\n")
    _write(tmp_path / "cgroup" / "cpu.max", "50000 100000\n")
    assert available_cores(tmp_path / "cgroup", tmp_path / "own") == 1


def test_affinity_counts(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert available_cores(tmp_path, tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert available_cores(tmp_path, tmp_path / "none") == len(allowed)


@pytest.mark.parametrize(
    ("cores", "local_ranks", "environ", "expected"),
    [
        (16, 4, {}, 4),
        (2, 4, {}, 1),
        (16, 1, {}, 16),
        (7, 2, {}, 3),
        (16, 4, {"OMP_NUM_THREADS": "6"}, 6),
        (16, 1, {"OMP_NUM_THREADS": "1"}, 1),
        # torchrun sets 1 where nobody did.
        (16, 4, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 4),
        (16, 1, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 1),
        (16, 4, {"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "none"}, 3),
        (16, 4, {"OMP_NUM_THREADS": "all"}, 4),
        # srun bound each task to its own 8 cores, or bound nothing.
        (8, 4, {"SLURM_CPUS_PER_TASK": "8"}, 8),
        (32, 4, {"SLURM_CPUS_PER_TASK": "8"}, 8),
    ],
)
def test_threads(cores: int, local_ranks: int, environ: dict[str, str], expected: int) -> None:
    assert threads_per_rank(cores, local_ranks, environ) == expected

"""Cores of a process: affinity, and cgroup quotas of both versions; the memory that is left to it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ctxlm_ds.process.cgroups import available_cores, available_memory


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
def test_version_2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    _write(tmp_path / "own", "0::/slurm/job_7/step_0\n")
    root = tmp_path / "cgroup"
    assert available_cores(root, tmp_path / "own") == 8
    _write(root / "slurm" / "cpu.max", "max 100000\n")
    assert available_cores(root, tmp_path / "own") == 8
    _write(root / "slurm" / "job_7" / "cpu.max", "350000 100000\n")
    _write(root / "slurm" / "job_7" / "step_0" / "cpu.max", "800000 100000\n")
    assert available_cores(root, tmp_path / "own") == 3


@pytest.mark.usefixtures("eight_cores")
def test_version_2_in_a_container_whose_path_is_outside(tmp_path: Path) -> None:
    _write(tmp_path / "own", "0::/../../docker/abc\n")
    _write(tmp_path / "cgroup" / "cpu.max", "150000 100000\n")
    assert available_cores(tmp_path / "cgroup", tmp_path / "own") == 1


@pytest.mark.usefixtures("eight_cores")
def test_version_1(tmp_path: Path) -> None:
    _write(tmp_path / "own", "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/y\n")
    folder = tmp_path / "cgroup" / "cpu,cpuacct" / "docker" / "abc"
    _write(folder / "cpu.cfs_period_us", "100000\n")
    _write(folder / "cpu.cfs_quota_us", "-1\n")
    assert available_cores(tmp_path / "cgroup", tmp_path / "own") == 8
    _write(folder / "cpu.cfs_quota_us", "200000\n")
    assert available_cores(tmp_path / "cgroup", tmp_path / "own") == 2


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


def test_memory_is_the_machines_cut_by_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "own", "0::/job\n")
    places = tmp_path / "cgroup", tmp_path / "own"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4000 * 1024))
    assert available_memory(*places) == 4000 * 1024
    for name, text in (("max", "3000000"), ("current", "2000000"), ("stat", "inactive_file 5\nactive_file 0\n")):
        _write(tmp_path / "cgroup" / "job" / f"memory.{name}", text)
    assert available_memory(*places) == 1_000_005

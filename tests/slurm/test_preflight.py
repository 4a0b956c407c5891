"""A preflight on real nodes: a bad one is named with its reason, and the run goes on with the others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.cluster.slurm_commands import excluded_nodes
from ctxlm_ds.process.run_history import REQUEUE, START
from tests.slurm.cluster import Cluster
from tests.slurm.runs import Job, Runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
SHORT = {"max_steps": 6}
# The nodes share one disk and two cores: little room is asked for, and only a node far below the others is slow.
PREFLIGHT = {
    "CTXLM_PREFLIGHT": "1",
    "CTXLM_PREFLIGHT_MIN_RUN_GB": "0.01",
    "CTXLM_PREFLIGHT_MIN_SCRATCH_GB": "0.01",
    "CTXLM_PREFLIGHT_MIN_BANDWIDTH": "0.1",
    "CTXLM_PREFLIGHT_MIB": "1",
    "CTXLM_PREFLIGHT_LIMIT_S": "120",
    "CTXLM_PREFLIGHT_MIN_MEMORY_GB": "0.1",
}
FAULTY_SMI = """#!/bin/sh
errors=0
[ "$SLURMD_NODENAME" != n2 ] || errors=3
echo "NVIDIA Make-Believe, 81559, 12, 0"
echo "NVIDIA Make-Believe, 81559, 12, $errors"
"""
FAST_CLOCK = """import os, time
if os.environ.get("SLURMD_NODENAME") == "n3":
    true_time = time.time
    time.time = lambda: true_time() + 30.0
"""


@pytest.fixture
def full_disk_of_n2(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A scratch folder that is a full disk on n2 alone."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    cluster.node_exec("n2", "mount", "-n", "-t", "tmpfs", "-o", "size=256k", "tmpfs", scratch)
    yield scratch
    cluster.node_exec("n2", "umount", scratch)


@pytest.fixture
def slow_link_of_n3(cluster: Cluster) -> Iterator[None]:
    """What n3 sends goes through at 20 Mbit/s."""
    cluster.node_exec("n3", "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "64kb",
                      "latency", "100ms")  # fmt: skip
    yield
    cluster.node_exec("n3", "tc", "qdisc", "del", "dev", "eth0", "root")


def report_of(job: Job) -> dict[str, Any]:
    """The newest report of a preflight."""
    found = sorted(job.run_dir.glob("attempts/*/preflight/report.json"), key=lambda path: path.stat().st_mtime)
    assert found, job.explain()
    report: dict[str, Any] = json.loads(found[-1].read_text())
    return report


def test_a_bad_node_is_replaced(runs: Runs, full_disk_of_n2: Path, tmp_path: Path) -> None:
    """Two nodes are asked for and n1 and n2 given: the job comes back on n1 and n3, and stays away from n2."""
    environment = {**PREFLIGHT, "CTXLM_PREFLIGHT_BANDWIDTH": "0", "TMPDIR": str(full_disk_of_n2)}
    job = runs.submit(tmp_path, nodes=2, environment=environment, training=SHORT)
    job.assert_finished()
    reason = f"n2 is bad: scratch {full_disk_of_n2} cannot be written: No space left on device"
    assert f"preflight: {reason}" in job.text()
    assert job.restarts() == 1
    assert [event["world_size"] for event in job.events(START)] == [2], job.explain()
    assert "n2 cannot be used" in job.events(REQUEUE)[0]["why"]
    shown = runs.cluster.job(job.id)
    assert (shown["NodeList"], shown["ExcNodeList"]) == ("n[1,3]", "n2")
    assert list(excluded_nodes(job.run_dir)) == ["n2"]
    assert report_of(job)["bad"] == {}


def test_a_job_ends_where_no_other_nodes_are_left(runs: Runs, full_disk_of_n2: Path, tmp_path: Path) -> None:
    """All three nodes are asked for: Slurm would let the job wait for a fourth for ever."""
    environment = {**PREFLIGHT, "CTXLM_PREFLIGHT_BANDWIDTH": "0", "TMPDIR": str(full_disk_of_n2)}
    job = runs.submit(tmp_path, nodes=3, environment=environment, training=SHORT)
    assert job.end() == "FAILED"
    assert runs.cluster.job(job.id)["ExitCode"] == "2:0"
    assert "without n2 partition main has 2 nodes, the job needs 3" in job.text()
    assert job.events(START) == []


def test_a_faulty_gpu_and_a_wrong_clock_are_left_out(runs: Runs, tmp_path: Path) -> None:
    """nvidia-smi of n2 counts ECC errors, Python's clock on n3 is half a minute ahead: n1 goes on alone."""
    smi = tmp_path / "bin/nvidia-smi"
    clock = tmp_path / "site/sitecustomize.py"
    for path, text in ((smi, FAULTY_SMI), (clock, FAST_CLOCK)):
        path.parent.mkdir()
        path.write_text(text)
        path.chmod(0o755)
    environment = {
        **PREFLIGHT, "CTXLM_PREFLIGHT_BANDWIDTH": "0", "CTXLM_PREFLIGHT_MIN_NODES": "1",
        "PATH": f"{smi.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(clock.parent),
    }  # fmt: skip
    job = runs.submit(tmp_path, nodes=3, environment=environment, training=SHORT)
    job.assert_finished()
    assert "n2 is bad: GPU 1: 3 uncorrected ECC errors, 0 are allowed" in job.text(), job.text()
    assert "continuing with 1 of 3 nodes, without n2, n3" in job.text()
    report = report_of(job)
    assert "from the nodes' median (2 s allowed)" in report["bad"]["n3"]
    assert report["clock_s"]["n3"] == pytest.approx(30.0, abs=1.0)


@pytest.mark.soak
def test_a_slow_node_is_left_out_at_once(runs: Runs, slow_link_of_n3: None, tmp_path: Path) -> None:
    """Three nodes, of which two are enough: reductions between pairs tell that n3 is the slow one."""
    environment = {**PREFLIGHT, "CTXLM_PREFLIGHT_MIN_NODES": "2"}
    job = runs.submit(tmp_path, nodes=3, environment=environment, training=SHORT)
    job.assert_finished()
    assert "continuing with 2 of 3 nodes, without n3" in job.text(), job.text()
    assert job.restarts() == 0
    assert [event["world_size"] for event in job.events(START)] == [2]
    report = report_of(job)
    assert list(report["bad"]) == ["n3"]
    assert "reductions with other nodes at" in report["bad"]["n3"]
    assert set(report["gb_per_s"]) == set(report["clock_s"]) == {"n1", "n2", "n3"}
    # One machine, one clock.
    assert max(map(abs, report["clock_s"].values())) < 0.5


def test_a_wrong_setting_ends_the_job_with_one_line(runs: Runs, tmp_path: Path) -> None:
    environment = {**PREFLIGHT, "CTXLM_PREFLIGHT_MIN_BANDWIDTH": "fast"}
    job = runs.submit(tmp_path, nodes=1, environment=environment, training=SHORT)
    assert job.end() == "FAILED"
    assert "CTXLM_PREFLIGHT_MIN_BANDWIDTH=fast: expected a number, 0 or more" in job.text()
    assert "Traceback" not in job.text()

"""The test cluster itself: if these fail, no other failure here means anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, wait_for, wait_for_text

pytestmark = pytest.mark.slurm


def test_nodes_are_machines_of_their_own(cluster: Cluster) -> None:
    found = cluster.run("srun", "-N3", "bash", "-c", "echo $(hostname) $(ip -o -4 addr show eth0 | wc -l)").stdout
    assert sorted(found.splitlines()) == ["n1 1", "n2 1", "n3 1"]


def test_a_batch_job_and_its_processes(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch("-N2", "-o", tmp_path / "log", "--wrap", "srun -N2 bash -c 'echo begun; exec sleep 987'")
    wait_for(lambda: sum("sleep 987" in line for line in cluster.strays()) >= 2, 60, "two tasks")
    wait_for_text(cluster.log(job), "begun")
    cluster.run("scancel", job)
    assert cluster.wait(job, 60) == "CANCELLED"
    cluster.assert_no_strays()


def test_a_dead_node_and_a_cut_one(cluster: Cluster) -> None:
    cluster.kill_node("n2", noticed=True)
    assert cluster.pids("n2") == []
    cluster.start_node("n2")
    assert reaches_n1(cluster, "n3")
    cluster.cut_node("n3")
    assert not reaches_n1(cluster, "n3")
    cluster.join_node("n3")
    wait_for(lambda: reaches_n1(cluster, "n3"), 30, "n3 to find n1 again")


def reaches_n1(cluster: Cluster, node: str) -> bool:
    """Whether the node can connect to the Slurm daemon of n1."""
    connect = "timeout 2 bash -c '</dev/tcp/n1/6818'"
    return cluster.node_exec(node, "bash", "-c", connect, check=False).returncode == 0

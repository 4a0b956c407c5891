"""Staging on real nodes, each with a disk of its own (a tmpfs in its mount namespace)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import START
from tests.slurm.cluster import Cluster
from tests.slurm.runs import Job, Runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture
def local_disks(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A folder that is another disk on n1 and on n2."""
    folder = tmp_path / "local"
    folder.mkdir()
    for node in ("n1", "n2"):
        cluster.node_exec(node, "mount", "-n", "-t", "tmpfs", "-o", "size=512m", "tmpfs", folder)
    yield folder
    for node in ("n1", "n2"):
        cluster.node_exec(node, "umount", folder)


def submit(runs: Runs, folder: Path, disk: Path, max_steps: int) -> Job:
    """A run of so many steps in the same run directory each time; the schedule is that of the longest."""
    return runs.submit(
        folder, nodes=2, environment={"CTXLM_STAGE_DIR": str(disk)},
        training={"max_steps": max_steps}, schedule={"total_steps": 8}, checkpoint={"interval_steps": 4},
    )  # fmt: skip


def test_a_run_reads_copies_on_each_node_and_goes_on_without_them(
    runs: Runs, cluster: Cluster, local_disks: Path, tmp_path: Path
) -> None:
    """Half a run with copies, the rest where one node has no room for one of them any more."""
    first = submit(runs, tmp_path, local_disks, max_steps=4)
    first.assert_finished()
    assert f"staging: 2 nodes have their copies in {local_disks}" in first.text(), first.text()
    assert "read from where the recipe says" not in first.text()
    staged = [cluster.node_exec(node, "find", local_disks, "-name", "*.bin").stdout.split() for node in ("n1", "n2")]
    assert staged[0] == staged[1]
    assert len(staged[0]) == 2
    assert not any((tmp_path / "local").rglob("*.bin")), "copied to the shared disk"
    assert str(local_disks) in (first.run_dir / "config.yaml").read_text()

    # A copy is damaged and would have to be written again, but n2 has no room left.
    cluster.node_exec("n2", "truncate", "-s", "1", next(path for path in staged[1] if "train" in path))
    cluster.node_exec("n2", "sh", "-c", f"cat /dev/zero >{local_disks}/filler; true")
    second = submit(runs, tmp_path, local_disks, max_steps=8)
    second.assert_finished()
    assert "staging: n2: failed" in second.text(), second.text()
    assert second.text().count("read from where the recipe says") == 1

    # It has found what the checkpoint was made of, or it would have refused to go on.
    assert [event["step"] for event in second.events(START)] == [0, 4]
    assert list(second.curves()["loss"]) == list(range(1, 9))

"""What is done on each node before a run: its check by slurm/preflight.sh, and copies on its own disk (a tmpfs)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import START
from tests.slurm.cluster import Cluster
from tests.slurm.runs import Job, Runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
FAULTY_SMI = """#!/bin/sh
errors=0
[ "$SLURMD_NODENAME" != n1 ] || errors=3
echo "NVIDIA Make-Believe, 81559, 12, 0"
echo "NVIDIA Make-Believe, 81559, 12, $errors"
"""


def test_what_cannot_be_checked_is_said(runs: Runs, tmp_path: Path) -> None:
    site = tmp_path / "env.sh"
    site.write_text("CTXLM_PREFLIGHT=1\nCTXLM_STAGE_DIR=/proc/nowhere\n")
    job = runs.submit(tmp_path, environment={"CTXLM_ENV": str(site), "CTXLM_RESTART": "off"})
    text = job.text
    job.wait_for(lambda: "BAD" in text(), "the bad nodes")
    runs.cluster.run("scancel", job.id)
    assert "preflight: n1: no nvidia-smi, GPUs are not checked" in text()
    assert "preflight: n1: BAD: /proc/nowhere cannot be written" in text()


@pytest.fixture
def local_disks(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A folder that is another disk on each node."""
    folder = tmp_path / "local"
    folder.mkdir()
    for node in cluster.nodes:
        cluster.node_exec(node, "mount", "-n", "-t", "tmpfs", "-o", "size=512m", "tmpfs", folder)
    yield folder
    for node in cluster.nodes:
        cluster.node_exec(node, "umount", folder)


def submit(runs: Runs, folder: Path, max_steps: int, *options: str, **environment: str) -> Job:
    """A run of so many steps in the same run directory each time; the schedule is that of the longest."""
    return runs.submit(
        folder, *options, nodes=2, environment=environment,
        training={"max_steps": max_steps}, schedule={"total_steps": 8}, checkpoint={"interval_steps": 4},
    )  # fmt: skip


def test_the_job_is_requeued_without_a_bad_node_and_reads_copies_where_there_is_room(
    runs: Runs, cluster: Cluster, local_disks: Path, tmp_path: Path
) -> None:
    """Half a run with copies, the rest where one node has no room for one of them any more."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(FAULTY_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    site = tmp_path / "env.sh"
    site.write_text(f"PATH={tmp_path}/bin:$PATH\nCTXLM_PREFLIGHT=1\nCTXLM_STAGE_DIR={local_disks}\n")
    first = submit(runs, tmp_path, 4, CTXLM_ENV=str(site))
    first.assert_finished()
    text = first.text()
    assert "preflight: n1: BAD: GPU 1: 3 uncorrected ECC errors" in text, text
    assert "preflight: requeueing the job without n1" in text
    assert "preflight: n3: 2 x NVIDIA Make-Believe" in text
    assert "preflight: all-reduce of 64 MiB over 2 ranks" in text
    assert first.restarts() == 1 and [start["host"] for start in first.events(START)] == ["n2"]
    assert f"staging: 2 nodes have their copies in {local_disks}" in text, text
    assert "read from where the recipe says" not in text
    staged = [cluster.node_exec(node, "find", local_disks, "-name", "*.bin").stdout.split() for node in ("n2", "n3")]
    assert staged[0] == staged[1]
    assert len(staged[0]) == 2
    assert not any((tmp_path / "local").rglob("*.bin")), "copied to the shared disk"
    assert str(local_disks) in (first.run_dir / "config.yaml").read_text()

    # A copy is damaged and would have to be written again, but n2 has no room left.
    cluster.node_exec("n2", "truncate", "-s", "1", next(path for path in staged[0] if "train" in path))
    cluster.node_exec("n2", "sh", "-c", f"cat /dev/zero >{local_disks}/filler; true")
    second = submit(runs, tmp_path, 8, "--exclude=n1", CTXLM_STAGE_DIR=str(local_disks))
    second.assert_finished()
    assert "staging: n2: failed" in second.text(), second.text()
    assert second.text().count("read from where the recipe says") == 1

    # It has found what the checkpoint was made of, or it would have refused to go on.
    assert [event["step"] for event in second.events(START)] == [0, 4]
    assert list(second.curves()["loss"]) == list(range(1, 9))

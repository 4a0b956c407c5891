"""The `deepspeed` launcher with a hostfile over pdsh and ssh: slurm/deepspeed_hostfile.sbatch on two nodes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.process.run_history import START
from tests.integration.route import NO_DROPOUT, call, launcher, pretrain_words
from tests.slurm.cluster import Cluster, command_of
from tests.slurm.runs import Job, Runs, assert_close, curves

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
SCRIPT = "slurm/deepspeed_hostfile.sbatch"
SHORT: dict[str, Any] = {
    "training": {"max_steps": 6}, "model": NO_DROPOUT, "evaluation": {"interval_steps": 6}
}  # fmt: skip
LONG: dict[str, Any] = {"training": {"max_steps": 100_000}, "checkpoint": {"interval_steps": 100_000}}


@pytest.fixture(scope="module")
def ssh_cluster() -> Iterator[Cluster]:
    """Two nodes that reach each other by ssh."""
    missing = [name for name in ("sshd", "pdsh") if shutil.which(name, path="/usr/bin:/usr/sbin") is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    with Cluster.started(2, TESTBED_SSHD="1") as running:
        yield running


@pytest.fixture(scope="module")
def ssh_runs(ssh_cluster: Cluster, runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ssh_cluster, runs.route, tmp_path_factory.mktemp("hostfile"))


def submit(runs: Runs, folder: Path, *options: str, of_slurm: tuple[str, ...] = (), **sections: dict[str, Any]) -> Job:
    """sbatch of the script; `options` are deepspeed's."""
    recipe = runs.recipe(folder, **sections)
    log, run_dir = folder / "job.log", folder / "run"
    job = runs.cluster.sbatch(
        "--nodes=2", "--ntasks-per-node=1", f"--output={log}", *of_slurm, SCRIPT, *options, "--",
        "--config", recipe, "--deepspeed_config", "zero1", "--set", f"run_dir={run_dir}",
    )  # fmt: skip
    return Job(runs.cluster, job, run_dir, log)


def test_losses_equal_those_of_one_machine(ssh_runs: Runs, tmp_path: Path) -> None:
    job = submit(ssh_runs, tmp_path, **SHORT)
    alone = tmp_path / "alone"
    recipe = ssh_runs.recipe(alone, **SHORT)
    call(*launcher("forked", 1), *pretrain_words(recipe, [f"run_dir={alone / 'run'}"]))
    job.assert_finished()
    starts = job.events(START)
    assert [(event["world_size"], event["launcher"]) for event in starts] == [(2, "deepspeed")], job.explain()
    assert_close(job.curves(), curves(alone / "run"))
    assert "n1 slots=1\nn2 slots=1\n" in job.text()


@pytest.mark.soak
def test_include_and_deepspeed_env(ssh_runs: Runs, tmp_path: Path) -> None:
    """One node is left, not the one of the batch script; a variable of ./.deepspeed_env reaches its rank."""
    (tmp_path / ".deepspeed_env").write_text("CTXLM_ATTEMPT=from-the-file\n\n")
    job = submit(ssh_runs, tmp_path, "--include", "n2:0", of_slurm=(f"--chdir={tmp_path}",), **SHORT)
    job.assert_finished()
    start = job.events(START)[0]
    assert (start["world_size"], start["host"], start["attempt"]) == (1, "n2", "from-the-file")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("node", "victim", "state"),
    [
        ("n1", "deepspeed.launcher.runner", "FAILED"),
        ("n1", "pdsh", "COMPLETED"),  # DeepSpeed 0.19.8 takes a pdsh that was killed for one that has done its work
        ("n2", "deepspeed.launcher.launch", "FAILED"),
    ],
)
def test_ranks_end_with_a_launcher(node: str, victim: str, state: str, ssh_runs: Runs, tmp_path: Path) -> None:
    job = submit(ssh_runs, tmp_path, **LONG)
    job.wait_for_step(3)
    os.kill(next(pid for pid in ssh_runs.cluster.pids(node) if victim in command_of(pid).split()[:4]), signal.SIGKILL)
    assert job.end() == state
    ssh_runs.cluster.assert_no_strays(timeout_s=90)
    if node == "n1":  # asked to stop, the ranks have saved
        job.verify_checkpoints()


@pytest.mark.soak
def test_a_notice_ahead_of_the_limit_saves(ssh_runs: Runs, tmp_path: Path) -> None:
    job = submit(ssh_runs, tmp_path, **LONG)
    job.wait_for_step(3)
    ssh_runs.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.end()
    ssh_runs.cluster.assert_no_strays(timeout_s=90)
    job.verify_checkpoints()

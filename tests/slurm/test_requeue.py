"""What takes a job off its nodes: it comes back by itself and its curve is bitwise that of an undisturbed run.

All under `make soak`. `make test-slurm` has the notice ahead of a limit and a killed node (test_faults.py), and SIGTERM
(test_job.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import END, START
from tests.integration.route import NO_DROPOUT
from tests.slurm.runs import Job, Runs, assert_close

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(600)]


def assert_came_back(job: Job, runs: Runs) -> None:
    """Finished after one requeue, bitwise as undisturbed, and not from the beginning."""
    job.assert_finished()
    assert job.restarts() == 1, job.explain()
    assert job.curves() == runs.undisturbed()
    assert all(start["step"] > 0 for start in job.events(START)[1:]), job.explain()


def test_every_order_to_stop(runs: Runs, tmp_path: Path) -> None:
    """To the ranks, to Slurm, and the signal ahead of a time limit, one after another on one job.

    `scancel --batch --signal=USR1` takes the path that --signal=B:USR1@... takes, at once.
    """
    job = runs.submit(tmp_path)
    orders = (
        (15, ("scancel", "--signal=TERM", job.id)),
        (45, ("scontrol", "requeue", job.id)),
        (75, ("scancel", "--batch", "--signal=USR1", job.id)),
    )
    for starts, (step, order) in enumerate(orders, start=2):
        job.wait_for_step(step)
        runs.cluster.run(*order)
        job.wait_for_event(START, starts)
    job.assert_finished()
    assert job.restarts() == 3, job.explain()
    assert job.curves() == runs.undisturbed()
    stops, starts_again = job.events(END)[:3], job.events(START)[1:]
    assert [end["reason"] for end in stops] == ["stopped by signal SIGTERM"] * 2 + ["stopped by signal SIGUSR1"]
    assert not any(end["completed"] or end["failed"] for end in stops)
    assert [end["step"] for end in stops] == [start["step"] for start in starts_again], "steps were lost"


def test_the_time_limit_itself(runs: Runs, tmp_path: Path) -> None:
    """A minute's limit by Slurm's own clock; the signal comes at some moment of that minute."""
    job = runs.submit(tmp_path, "--time=1", "--signal=B:USR1@25", training={"max_steps": 3000})
    job.assert_finished(900)
    assert job.restarts() >= 1 and all(start["step"] > 0 for start in job.events(START)[1:]), job.explain()


def test_preemption(runs: Runs, tmp_path: Path) -> None:
    """A job of a partition with precedence takes all nodes."""
    job = runs.submit(tmp_path)
    job.wait_for_step(15)
    urgent = runs.cluster.sbatch("-p", "urgent", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    assert_came_back(job, runs)
    assert runs.cluster.wait(urgent, 60) == "COMPLETED"


def test_a_killed_node(runs: Runs, tmp_path: Path) -> None:
    """That of the batch script; another one: test_faults.py."""
    job = runs.submit(tmp_path)
    job.wait_for_step(25)
    runs.cluster.kill_node(runs.cluster.job(job.id)["BatchHost"], noticed=True)
    assert_came_back(job, runs)


def test_a_killed_node_and_no_spare_one(runs: Runs, tmp_path: Path) -> None:
    """--nodes=2-3: the job restarts with fewer ranks by itself; its losses equal those of the other layout to 1e-5."""
    training = {"max_steps": 60, "micro_batch_size": 2}
    short = {"training": training, "evaluation": {"interval_steps": 30}, "model": NO_DROPOUT}
    job = runs.submit(tmp_path, nodes="2-3", tasks=None, **short)
    job.wait_for_step(25)
    runs.cluster.kill_node("n3", noticed=True)
    job.assert_finished()
    assert [start["world_size"] for start in job.events(START)] == [3, 2], job.explain()
    whole = runs.submit(tmp_path / "whole", **short)
    whole.assert_finished()
    assert_close(job.curves(), whole.curves())


def test_a_node_cut_off_the_network(runs: Runs, tmp_path: Path) -> None:
    """Slurm finds out by itself. The lost rank goes on for a while, and may not write into the run that goes on."""
    job = runs.submit(tmp_path)
    job.wait_for_step(25)
    runs.cluster.cut_node("n2")
    job.wait_for_event(START, 2)
    runs.cluster.join_node("n2")
    assert_came_back(job, runs)


def test_the_cut_off_node_of_rank_0(runs: Runs, tmp_path: Path) -> None:
    """The one that holds the run's lock and writes its files: it is fenced off, and ends before the network is back."""
    job = runs.submit(tmp_path)
    job.wait_for_step(25)
    cut = runs.cluster.job(job.id)["BatchHost"]
    assert [rank.rank for rank in job.ranks() if rank.node == cut] == [0]
    runs.cluster.cut_node(cut)
    job.wait_for_event(START, 2, timeout_s=300)
    assert [rank.rank for rank in job.ranks() if rank.node == cut] == []
    runs.cluster.join_node(cut)
    # Slurm ends what it finds on a node that is back within a minute and a half.
    job.assert_finished(strays_s=150)
    # The old srun has been waiting for the network to end its step, which bears the number of the new one.
    assert job.restarts() in (1, 2), job.explain()
    assert job.curves() == runs.undisturbed()

"""What befalls a job within its allocation, and how it is stopped: it goes on by itself, bitwise, or says why not."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import FAILURE, GIVE_UP, START
from tests.slurm.runs import Job, Runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
ALONE = {"nodes": 1, "tasks": 1}


def kill_one(job: Job, drawn: random.Random) -> None:
    """kill -9 of a rank drawn at random."""
    drawn.choice(job.ranks()).send(signal.SIGKILL)


def test_a_rank_killed_in_the_middle_of_a_save(runs: Runs, tmp_path: Path) -> None:
    expected = runs.undisturbed()
    drawn = random.Random(5)
    job = runs.submit(tmp_path)
    first_step = drawn.randint(12, 30)
    job.wait_for(lambda: job.last_step() > first_step and job.is_saving(), "a save")
    kill_one(job, drawn)
    job.assert_finished()
    assert job.curves() == expected
    assert len(job.events(FAILURE)) == 1 and len(job.events(START)) == 2, job.explain()


def test_a_rank_that_hangs_leaves_stacks_and_is_replaced(runs: Runs, tmp_path: Path) -> None:
    expected = runs.undisturbed()
    job = runs.submit(tmp_path, watchdog={"step_minutes": 0.2})
    job.wait_for_step(15)
    job.ranks()[1].send(signal.SIGSTOP)
    job.assert_finished()
    assert job.curves() == expected
    joined = next(job.run_dir.glob("attempts/*/stacks.txt")).read_text()
    assert joined.startswith("=== rank 1 left no stacks"), job.explain()
    assert "=== rank 0 is here (waiting for other ranks)" in joined, joined


def test_a_plain_scancel_ends_the_job_for_good(runs: Runs, tmp_path: Path) -> None:
    job = runs.submit(tmp_path, **ALONE, training={"max_steps": 100_000})
    job.wait_for_step(15)
    runs.cluster.run("scancel", job.id)
    assert job.end(60) == "CANCELLED", job.explain()
    assert job.restarts() == 0 and not runs.cluster.run("squeue", "-h").stdout.strip()
    runs.cluster.assert_no_strays()
    job.verify_checkpoints()


def test_a_second_job_on_the_run_directory_is_refused(runs: Runs, tmp_path: Path) -> None:
    first = runs.submit(tmp_path, **ALONE, training={"max_steps": 100_000})
    first.wait_for_step(15)
    # By hand in a job of one's own there is only the run's lock.
    words = (sys.executable, "-m", "ctxlm_ds.pretrain", "--config", tmp_path / "recipe.yaml", "--wait-for-lock", "1")
    by_hand = runs.cluster.run("srun", "-N1", *words, "--set", f"run_dir={first.run_dir}", check=False)
    assert f"job {first.id}" in by_hand.stderr and "Traceback" not in by_hand.stderr, by_hand
    reached = first.last_step()
    first.wait_for_step(reached + 20)
    # Also while the first is in the queue, and nobody holds the lock.
    runs.cluster.scontrol("requeuehold", first.id)
    first.wait_for(lambda: runs.cluster.job(first.id)["JobState"] == "PENDING", "its return to the queue")
    second = runs.submit(tmp_path, **ALONE, training={"max_steps": 100_000})
    assert second.end(60) == "FAILED", second.explain()
    assert f"the run of job {first.id}, which is " in second.text() and "Traceback" not in second.text(), second.text()
    assert len(first.events(START)) == 1, first.explain()


def test_a_job_without_progress_gives_up_with_a_message(runs: Runs, tmp_path: Path) -> None:
    """Its rank is killed whenever one appears, before the first step."""
    job = runs.submit(tmp_path, **ALONE)
    killed: set[int] = set()

    def ended() -> bool:
        for rank in job.ranks():
            rank.send(signal.SIGKILL)
            killed.add(rank.pid)
        return bool(job.events(GIVE_UP))

    job.wait_for(ended, "the job to give up", 240)
    assert job.end(60) == "FAILED", job.explain()
    assert 2 <= len(killed) <= 12, killed
    assert "progress" in job.events(GIVE_UP)[0]["why"] and "progress" in job.text()[-2000:], job.explain()

"""What befalls a job: it goes on by itself, bitwise, or says why not; the status of its run meanwhile."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import END, FAILURE, GIVE_UP, START
from tests.slurm.runs import Runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
ALONE = {"nodes": 1, "tasks": 1}
MORE_STEPS = 15
"""After a start, more steps than lie between two checkpoints."""


def test_a_job_goes_on_through_all_that_befalls_it(runs: Runs, tmp_path: Path) -> None:
    """A rank killed in the middle of a save, one that hangs, the notice ahead of a time limit and a node that dies.

    `scancel --batch --signal=USR1` takes the path that --signal=B:USR1@... takes, at once.
    """
    drawn = random.Random(5)
    job = runs.submit(tmp_path, watchdog={"step_minutes": 0.2})
    first_step = drawn.randint(12, 20)
    job.wait_for(lambda: job.last_step() > first_step and job.is_saving(), "a save")
    drawn.choice(job.ranks()).send(signal.SIGKILL)
    later = job.wait_for_event(START, 2)[-1]["step"] + MORE_STEPS
    assert len(job.events(FAILURE)) == 1, job.explain()

    job.wait_for_step(later)
    job.ranks()[1].send(signal.SIGSTOP)
    hung = job.wait_for_event(START, 3)[-1]
    assert len(job.events(FAILURE)) == 2 and job.restarts() == 0, job.explain()
    joined = [text for path in job.run_dir.glob("attempts/*/stacks.txt") if "rank 1 left" in (text := path.read_text())]
    assert len(joined) == 1 and joined[0].startswith("=== rank 1 left no stacks"), job.explain()
    assert "=== rank 0 is here (waiting for other ranks)" in joined[0], joined

    job.wait_for_step(hung["step"] + MORE_STEPS)
    runs.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    back = job.wait_for_event(START, 4)[-1]
    (stop,) = (end for end in job.events(END) if end["reason"] == "stopped by signal SIGUSR1")
    assert not (stop["completed"] or stop["failed"]) and stop["step"] == back["step"], "steps were lost"
    assert job.restarts() == 1, job.explain()

    job.wait_for_step(back["step"] + MORE_STEPS)
    batch_host = runs.cluster.job(job.id)["BatchHost"]
    runs.cluster.kill_node(next(rank.node for rank in job.ranks() if rank.node != batch_host), noticed=True)
    job.assert_finished()
    assert job.restarts() == 2 and len(job.events(START)) == 5, job.explain()
    assert all(start["step"] > 0 for start in job.events(START)[1:]), job.explain()
    assert job.curves() == runs.undisturbed()
    done = job.status()
    assert (done["state"], done["step"], done["restarts"]) == ("completed", 120, 4)
    assert (done["checkpoint"], done["why"]) == ("step-00000120", "training.max_steps (120) reached")


def test_one_job_a_run_from_running_through_the_queue_to_scancel(runs: Runs, tmp_path: Path) -> None:
    """What its status says, and that no second job gets the run directory meanwhile."""
    first = runs.submit(tmp_path, **ALONE, training={"max_steps": 100_000})
    first.wait_for_step(15)
    found = first.status()
    assert (found["state"], found["job_id"], found["restarts"], found["of"]) == ("running", first.id, 0, 100_000)
    assert found["step"] >= 15 and found["loss"] > 0 and found["tokens_per_second"] > 0 and found["left_s"] > 0
    assert found["log"] == str(first.log)
    # By hand in a job of one's own there is only the run's lock.
    words = (sys.executable, "-m", "ctxlm_ds.pretrain", "--config", tmp_path / "recipe.yaml", "--wait-for-lock", "1")
    by_hand = runs.cluster.run("srun", "-N1", *words, "--set", f"run_dir={first.run_dir}", check=False)
    assert f"job {first.id}" in by_hand.stderr and "Traceback" not in by_hand.stderr, by_hand
    reached = first.last_step()
    first.wait_for_step(reached + 20)

    # Held, or it might be back before anybody looks; nobody holds the lock.
    runs.cluster.scontrol("requeuehold", first.id)
    # Slurm takes a moment to clear the node; until then the job's own word on its requeue stands.
    held = f"job {first.id} is "
    first.wait_for(lambda: (now := first.status())["state"] == "queued" and held in now["why"], "the job in the queue")
    waiting = first.status()
    assert waiting["left_s"] is None and waiting["checkpoint_problem"] is None
    second = runs.submit(tmp_path, **ALONE, training={"max_steps": 100_000})
    assert second.end(60) == "FAILED", second.explain()
    assert f"the run of job {first.id}, which is " in second.text() and "Traceback" not in second.text(), second.text()
    assert len(first.events(START)) == 1, first.explain()

    runs.cluster.scontrol("release", first.id)
    first.wait_for_step(first.wait_for_event(START, 2)[-1]["step"] + MORE_STEPS)
    runs.cluster.run("scancel", first.id)
    assert first.end(60) == "CANCELLED", first.explain()
    assert first.restarts() == 1 and not runs.cluster.run("squeue", "-h").stdout.strip()
    runs.cluster.assert_no_strays()
    first.verify_checkpoints()
    assert len(first.events(START)) == 2, first.explain()


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

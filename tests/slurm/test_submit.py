"""`ctxlm submit` on a real Slurm: the name and log of a job, a profile, a sweep whose tasks are put back one by one.

Every batch script in slurm/ is accepted as it is: options, sizes, limits (sbatch --test-only).
So are the options of every profile.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from ctxlm_ds.apps.cluster.submit import PROFILE_LINE
from ctxlm_ds.process.run_history import START
from tests.slurm.cluster import ROOT, Cluster
from tests.slurm.runs import Job, Runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
CTXLM = (sys.executable, "-m", "ctxlm_ds.cli")
PROFILES = sorted((ROOT / "slurm" / "profiles").glob("*.sh"))
SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "slurm").rglob("*.sbatch"))


def submit(runs: Runs, *words: object) -> tuple[str, str]:
    """The job's id, and what the command printed."""
    done = runs.cluster.run(*CTXLM, "submit", *words, CTXLM_RESTART_DELAY_S="0")
    found = re.search(r"^job (\d+):", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return found[1], done.stdout


def test_a_job_is_named_after_its_run_and_logs_there(runs: Runs, tmp_path: Path) -> None:
    recipe = runs.recipe(tmp_path, training={"max_steps": 6})
    profile = tmp_path / "site.sh"
    profile.write_text("#SBATCH --partition=main --comment='of the profile'\n#SBATCH --nodes=2\n")
    job, printed = submit(runs, recipe, "--profile", profile, "--set", f"run_dir={tmp_path}/mine", "--time=00:10:00")
    shown = runs.cluster.job(job)
    assert (shown["JobName"], shown["TimeLimit"]) == ("mine", "00:10:00"), shown
    assert "Comment=of the profile" in runs.cluster.scontrol("show", "job", job)
    log = tmp_path / "mine" / f"slurm-{job}.log"
    assert Path(shown["StdOut"]) == log and str(log) in printed and "to start at" in printed
    run = Job(runs.cluster, job, tmp_path / "mine", log)
    run.assert_finished()
    assert "saved" in run.text() and [event["world_size"] for event in run.events(START)] == [2]


def test_a_job_that_cannot_run_is_not_queued(runs: Runs, tmp_path: Path) -> None:
    recipe = runs.recipe(tmp_path)
    words = (*CTXLM, "submit", recipe, "--set", f"run_dir={tmp_path}/run")
    for option, told in (("--partition=gup", "invalid partition"), ("--nodes=5", "multiple"), ("--time=x", "time")):
        done = runs.cluster.run(*words, option, check=False)
        assert done.returncode == 2 and told in done.stderr.lower(), done.stdout + done.stderr
    assert runs.cluster.run("squeue", "-h").stdout == "" and not (tmp_path / "run").exists()


def test_each_task_of_a_sweep_is_put_back_alone(runs: Runs, tmp_path: Path) -> None:
    """The last task has the array's own id, by which Slurm would put back every task."""
    recipe = runs.recipe(tmp_path, training={"max_steps": 100_000})
    sweep = tmp_path / "lr.txt"
    sweep.write_text("optimizer.learning_rate=1e-3\noptimizer.learning_rate=2e-3 training.max_steps=100_001\n")
    array, _ = submit(runs, recipe, "--sweep", sweep, "--set", f"run_dir={tmp_path}/lr")
    folders = [tmp_path / "lr" / str(task) for task in (0, 1)]
    tasks = [Job(runs.cluster, f"{array}_{i}", run, run / f"slurm-{array}.log") for i, run in enumerate(folders)]
    for task in tasks:
        task.wait_for_step(5)
    ids = runs.cluster.run("squeue", "-h", "-o", "%i %A").stdout.split("\n")
    last = next(task for task in tasks if f"{task.id} {array}" in ids)
    other = next(task for task in tasks if task is not last)
    runs.cluster.run("scancel", "--batch", "--signal=USR1", last.id)
    # Slurm may kill the batch script before it prints that the job is requeued.
    assert len(last.wait_for_event(START, 2)) == 2 and "putting the job back into the queue" in last.text()
    reached = other.last_step()
    for task, step in ((last, last.events(START)[1]["step"] + 5), (other, reached + 5)):
        task.wait_for_step(max(step, 11))
    runs.cluster.run("scancel", array)
    for task, of in zip(tasks, (100_000, 100_001), strict=True):
        task.wait_for(task.is_over, "its end", 60)
        assert yaml.safe_load((task.run_dir / "config.yaml").read_text())["training"]["max_steps"] == of
        task.verify_checkpoints()
    assert [len(task.events(START)) for task in (last, other)] == [2, 1], last.explain() + other.explain()


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_sbatch_takes_the_script(script: object, cluster: Cluster) -> None:
    """Planned on a partition of 128 nodes with 8 GPUs each that exist on paper only."""
    planned = cluster.run("sbatch", "--test-only", "--partition=paper", script, "recipe.yaml", check=False)
    assert planned.returncode == 0 and "to start at" in planned.stderr, planned.stderr


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_sbatch_takes_the_options_of_a_profile(profile: Path, cluster: Cluster) -> None:
    options = shlex.split("\n".join(PROFILE_LINE.findall(profile.read_text())), comments=True)
    words = ["--test-only", "--partition=paper", *options, "slurm/pretrain.sbatch", "recipe.yaml"]
    planned = cluster.run("sbatch", *words, check=False)
    assert options and planned.returncode == 0 and "to start at" in planned.stderr, planned.stderr

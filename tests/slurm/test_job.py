"""The supervisor of slurm/pretrain.sbatch: arrays where requeue is disabled, the readable log, mistakes, env.sh."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import REQUEUE, START
from tests.integration.route import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.runs import Runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
ALONE = {"nodes": 1, "tasks": 1}


def test_where_requeueing_is_disabled_the_tasks_of_an_array_follow_each_other(runs: Runs, tmp_path: Path) -> None:
    """Bitwise as undisturbed; what waits for the array begins when the run is complete."""
    expected = runs.undisturbed()
    job = runs.submit(tmp_path, "--no-requeue", "--array=1-3%1")
    waiting = runs.cluster.sbatch(
        f"--dependency=afterok:{job.id}", "-o", tmp_path / "after", "--wrap", f"ls {job.run_dir}/checkpoints"
    )
    job.wait_for_step(15)
    # scancel tries again while the task ends, then finds it gone and fails; the event shows that the signal came.
    runs.cluster.run("scancel", "--signal=TERM", f"{job.id}_1", check=False)
    job.wait_for_event(REQUEUE)
    job.wait_for(job.is_over, "its end", 300)
    assert len({start["job_id"] for start in job.events(START)}) == 2
    assert "the next task of the array continues the run" in job.text()
    assert "is complete; nothing is left for this task of the array" in job.text()
    assert job.curves() == expected
    assert runs.cluster.wait(waiting, 60) == "COMPLETED"
    assert "step-00000120" in (tmp_path / "after").read_text(), "it ran before the run was complete"


def test_the_first_failing_rank_s_traceback_is_the_last_word(runs: Runs, tmp_path: Path) -> None:
    """A rank whose node lacks a library: the others only lose it. The start makes no progress, so the job gives up."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'ctxlm_ds.run':\n"
        "            raise ImportError('libbroken.so: cannot open shared object file')\n"
        "if os.environ.get('SLURM_PROCID') == '1' and 'CTXLM_ATTEMPT' in os.environ:\n"
        "    sys.meta_path.insert(0, Broken())\n"
    )
    job = runs.submit(tmp_path, environment={"PYTHONPATH": str(tmp_path), "CTXLM_MAX_RESTARTS": "1"})
    assert job.end() == "FAILED"
    text = job.text()
    (first,) = text.split("first failing rank: ")[1:]
    assert first.startswith("rank 1 on n") and "libbroken.so" in first.splitlines()[0]
    assert "ImportError: libbroken.so" in first.partition("gave up")[0].strip().splitlines()[-2]
    assert "1 starts in a row made no progress" in first
    assert text.count("Traceback") == 1, text
    (raw,) = job.run_dir.glob("attempts/*/output.log")
    assert "\n1: " in raw.read_text() and str(raw) in text


def test_mistakes_end_at_once_with_their_message_last(runs: Runs, tmp_path: Path) -> None:
    """In the recipe, before anything starts; in the data, on the ranks; in env.sh."""
    wrong = runs.submit(tmp_path / "a", **ALONE, overrides=("training.max_stepz=3",))
    missing = runs.submit(tmp_path / "b", **ALONE, overrides=("data.train=[/nowhere/at-all]",))
    site = tmp_path / "env.sh"
    site.write_text("CTXLM_RESTART=perhaps\n")
    settings = runs.submit(tmp_path / "c", **ALONE, environment={"CTXLM_ENV": str(site)})
    assert [job.end(120) for job in (wrong, missing, settings)] == ["FAILED"] * 3
    assert "max_steps" in wrong.text() and not wrong.run_dir.exists()
    assert "/nowhere/at-all" in missing.text().splitlines()[-1], missing.text()
    assert "CTXLM_RESTART=perhaps" in settings.text().splitlines()[-1]
    for job in (wrong, missing, settings):
        assert runs.cluster.job(job.id)["ExitCode"] == "2:0" and job.restarts() == 0
        assert "Traceback" not in job.text()


@pytest.mark.soak
def test_an_interrupt_stops_the_run_for_good(runs: Runs, tmp_path: Path) -> None:
    """`scancel --signal=INT`: saved, complete, not put back."""
    job = runs.submit(tmp_path, training={"max_steps": 100_000})
    job.wait_for_step(15)
    runs.cluster.run("scancel", f"--signal={signal.SIGINT.value}", job.id)
    assert job.end(120) == "COMPLETED", job.explain()
    assert job.restarts() == 0 and len(job.events(START)) == 1
    job.verify_checkpoints()


def test_one_task_a_gpu_in_a_container(tmp_path: Path, runs: Runs) -> None:
    """--gpus-per-node alone starts a rank for each GPU, in the container that env.sh names."""
    (tmp_path / "bin").mkdir()
    apptainer = tmp_path / "bin" / "apptainer"
    apptainer.write_text('#!/bin/sh\n[ "$1 $2 $3 $4" = "exec --nv --bind /data" ] && shift 5 && IN_IMAGE=1 exec "$@"\n')
    apptainer.chmod(0o755)
    site = tmp_path / "env.sh"
    site.write_text(
        f"PATH={tmp_path}/bin:$PATH\nCTXLM_CONTAINER=image.sif\nCTXLM_CONTAINER_OPTIONS='--bind /data'\n"
        f"CTXLM_CONTAINER_PYTHON={sys.executable}\nCTXLM_SRUN_OPTIONS='--job-name=ranks --overlap'\n"
    )
    with Cluster.started(1, TESTBED_GPUS="2") as cluster:
        gpus = Runs(cluster, runs.route, tmp_path)
        environment, short = {"CTXLM_ENV": str(site)}, {"max_steps": 6}
        options = ("--gpus-per-node=2", "--cpus-per-task=2")
        job = gpus.submit(tmp_path / "gpus", *options, **ALONE, training=short, environment=environment)
        assert job.end() == "COMPLETED", job.explain()
        assert job.events(START)[0]["world_size"] == 2
        wrong = gpus.submit(tmp_path / "wrong", **ALONE, overrides=("model.layers=2",), environment=environment)
        assert wrong.end() == "FAILED" and "model.num_layers" in wrong.text(), wrong.text()


@pytest.mark.soak
def test_a_time_limit_without_notice_and_a_rank_that_cannot_save(runs: Runs, tmp_path: Path) -> None:
    """Slurm kills everything KillWait after the limit; the job is back in the queue by then."""
    job = runs.submit(tmp_path, "--time=1", "--signal=B:CONT@1", training={"max_steps": 100_000})
    job.wait_for_step(15)
    job.ranks()[1].send(signal.SIGSTOP)
    wait_for(lambda: len(job.events(START)) == 2, 300, f"the second start\n{job.explain()}")
    assert "Slurm ends the job (TimeLimit): job" in job.text() and job.restarts() == 1
    assert job.events(START)[1]["step"] > 0

"""slurm/pretrain.sbatch as it is, on 2 nodes with 2 tasks each and on 3 nodes: the losses are those of one machine.

A script of slurm/published: two phases in one run, with a model made small.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import START
from tests.integration.route import NO_DROPOUT, call, launcher, pretrain_words
from tests.slurm.runs import Job, Runs, assert_close, curves

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
SHORT = {"max_steps": 12}


@pytest.fixture(scope="module")
def one_machine(runs: Runs) -> dict[str, dict[int, float]]:
    """One process, no Slurm."""
    folder = runs.folder / "one-machine"
    recipe = runs.recipe(folder, training=SHORT, model=NO_DROPOUT, evaluation={"interval_steps": 6})
    call(*launcher("forked", 1), *pretrain_words(recipe, [f"run_dir={folder / 'run'}"]))
    return curves(folder / "run")


@pytest.mark.parametrize(("nodes", "tasks", "micro"), [(2, 2, 3), pytest.param(3, 1, 4, marks=pytest.mark.soak)])
def test_losses_equal_those_of_one_machine(
    nodes: int, tasks: int, micro: int, runs: Runs, one_machine: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    training = {**SHORT, "micro_batch_size": micro}
    job = runs.submit(
        tmp_path, nodes=nodes, tasks=tasks, training=training, model=NO_DROPOUT, evaluation={"interval_steps": 6}
    )
    job.assert_finished()
    assert [event["world_size"] for event in job.events(START)] == [nodes * tasks], job.explain()
    assert_close(job.curves(), one_machine)
    assert "Traceback" not in job.text() and "rror" not in job.text(), job.text()


SMALL = (
    "model.hidden_size=32", "model.num_layers=2", "model.num_attention_heads=2", "model.intermediate_size=64",
    "model.vocab_size=null", "data.seq_length=32", "objective.max_predictions=null", "data.num_workers=1",
    "training.global_batch_size=8", "training.micro_batch_size=2", "training.precision=fp32",
    "evaluation.interval_steps=0", "checkpoint.interval_steps=3", "logging.interval_steps=1",
    "logging.tensorboard=false", "phases.1.set.data.seq_length=64", "phases.1.set.objective.max_predictions=null",
    "phases.1.set.training.global_batch_size=4", "phases.1.set.training.micro_batch_size=2",
)  # fmt: skip


def submit(runs: Runs, folder: Path, nodes: int, *steps: int) -> Job:
    """The script with a small model and phases of `steps`."""
    lengths = [f"phases.{number}.steps={count}" for number, count in enumerate(steps)]
    settings = (*SMALL, f"data.train=[{runs.route.train}]", f"tokenizer.path={runs.route.tokenizer}", *lengths)
    job = runs.cluster.sbatch(
        f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=0", f"--output={folder / 'job.log'}",
        "slurm/published/bert-base-lamb.sbatch", "--set", *settings, f"run_dir={folder / 'run'}",
    )  # fmt: skip
    return Job(runs.cluster, job, folder / "run", folder / "job.log")


@pytest.mark.soak
def test_both_phases_are_one_run(runs: Runs, tmp_path: Path) -> None:
    job = submit(runs, tmp_path, 2, 6, 6)
    job.assert_finished()
    assert "no layout for 2 x 1 unknown GPU" in job.text(), job.text()
    assert "phase 2 of 2 begins: rows start again" in job.text() and job.last_step() == 12, job.text()

    # The phase that is over stays as it is, and the last one goes on.
    again = submit(runs, tmp_path, 2, 6, 8)
    again.assert_finished()
    assert [event["step"] for event in again.events(START)] == [0, 6, 12] and again.last_step() == 14


@pytest.mark.soak
def test_a_notice_is_heard_in_either_phase(runs: Runs, tmp_path: Path) -> None:
    """The batch script stands between Slurm and the supervisor: the job saves, is requeued, and finishes."""
    job = submit(runs, tmp_path, 1, 150, 150)
    for step in (5, 155):
        job.wait_for_step(step)
        runs.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.assert_finished()
    assert job.restarts() == 2 and job.last_step() == 300, job.explain()

"""slurm/pretrain.sbatch as it is, on 2 nodes with 2 tasks each and on 3 nodes: the losses are those of one machine.

A script of slurm/published: two phases, one after the other, with a model made small.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import START, is_completed
from tests.integration.route import call, launcher, pretrain_words
from tests.slurm.runs import NO_DROPOUT, Job, Runs, assert_close, curves, last_step

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
    "training.global_batch_size=8", "training.micro_batch_size=2", "training.max_steps=6", "training.precision=fp32",
    "evaluation.interval_steps=0", "checkpoint.interval_steps=3", "logging.interval_steps=1",
    "logging.tensorboard=false",
)  # fmt: skip


def submit(runs: Runs, folder: Path, nodes: int, *overrides: str) -> Job:
    """The script with a small model, and the run of its first phase."""
    settings = (*SMALL, f"data.train=[{runs.route.train}]", f"tokenizer.path={runs.route.tokenizer}", *overrides)
    job = runs.cluster.sbatch(
        f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=0", f"--output={folder / 'job.log'}",
        "slurm/published/bert-base-lamb.sbatch", "--set", *settings, CTXLM_RUNS=str(folder / "runs"),
    )  # fmt: skip
    return Job(runs.cluster, job, folder / "runs" / "bert-base-lamb-phase1", folder / "job.log")


@pytest.mark.soak
def test_both_phases_run_in_one_job(runs: Runs, tmp_path: Path) -> None:
    job = submit(runs, tmp_path, 2)
    assert job.end() == "COMPLETED", job.explain()
    assert job.text().count("no layout for 2 x 1 unknown GPU") == 2, job.text()
    second = tmp_path / "runs" / "bert-base-lamb-phase2"
    assert is_completed(job.run_dir) and is_completed(second), job.explain()
    assert f"initialize_from: {job.run_dir}" in (second / "config.yaml").read_text()

    # The finished first phase is not started again, and the second goes on.
    again = submit(runs, tmp_path, 2, "training.max_steps=8")
    assert again.end() == "COMPLETED", again.explain()
    assert len(again.events(START)) == 1 and last_step(second) == 8


@pytest.mark.soak
def test_a_notice_reaches_the_phase_that_runs(runs: Runs, tmp_path: Path) -> None:
    """The batch script stands between Slurm and the supervisor: the job saves, is requeued, and finishes."""
    job = submit(runs, tmp_path, 1, "training.max_steps=150")
    job.wait_for_step(5)
    runs.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    assert job.end() == "COMPLETED", job.explain()
    assert job.restarts() == 1 and len(job.events(START)) == 2, job.explain()
    assert is_completed(tmp_path / "runs" / "bert-base-lamb-phase2"), job.explain()

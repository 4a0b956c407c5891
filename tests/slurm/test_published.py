"""A script of slurm/published as a job: two phases, one after the other, with a model made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import END, START, is_completed, read_history
from tests.slurm.runs import Job, Runs

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(900)]
SMALL = (
    "model.hidden_size=32", "model.num_layers=2", "model.num_attention_heads=2", "model.intermediate_size=64",
    "model.vocab_size=null", "data.seq_length=32", "objective.max_predictions=null", "data.num_workers=1",
    "training.global_batch_size=8", "training.micro_batch_size=2", "training.max_steps=6", "training.precision=fp32",
    "evaluation.interval_steps=0", "checkpoint.interval_steps=3", "logging.interval_steps=1",
    "logging.tensorboard=false",
)  # fmt: skip


def test_both_phases_run_in_one_job(runs: Runs, tmp_path: Path) -> None:
    data = [f"data.train=[{runs.route.train}]", f"tokenizer.path={runs.route.tokenizer}"]
    words = ["slurm/published/bert-base-lamb.sbatch", "--set", *SMALL, *data]
    options = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", f"--output={tmp_path / 'job.log'}"]
    job = runs.cluster.sbatch(*options, *words, CTXLM_RUNS=str(tmp_path / "runs"))
    state = runs.cluster.wait(job, 420)
    text = (tmp_path / "job.log").read_text()
    assert state == "COMPLETED", text
    assert text.count("no layout for 2 x 1 unknown GPU") == 2, text
    first, second = (tmp_path / "runs" / f"bert-base-lamb-phase{phase}" for phase in (1, 2))
    for run_dir in (first, second):
        last = [event for event in read_history(run_dir) if event["event"] == END][-1]
        assert last["completed"], text
    assert f"initialize_from: {first}" in (second / "config.yaml").read_text()

    # The finished first phase is not started again, and the second goes on.
    further = [word.replace("max_steps=6", "max_steps=8") for word in words]
    again = runs.cluster.sbatch(*options, *further, CTXLM_RUNS=str(tmp_path / "runs"))
    assert runs.cluster.wait(again, 420) == "COMPLETED", (tmp_path / "job.log").read_text()
    assert len([event for event in read_history(first) if event["event"] == START]) == 1
    lines = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == 8


def test_a_notice_reaches_the_phase_that_runs(runs: Runs, tmp_path: Path) -> None:
    """The batch script stands between Slurm and the supervisor: the job saves, is requeued, and finishes."""
    data = [f"data.train=[{runs.route.train}]", f"tokenizer.path={runs.route.tokenizer}", "training.max_steps=150"]
    job = Job(
        runs.cluster,
        runs.cluster.sbatch(
            "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0", f"--output={tmp_path / 'job.log'}",
            "slurm/published/bert-base-lamb.sbatch", "--set", *SMALL, *data, CTXLM_RUNS=str(tmp_path / "runs"),
        ),
        tmp_path / "runs" / "bert-base-lamb-phase1",
        tmp_path / "job.log",
    )  # fmt: skip
    job.wait_for_step(5)
    runs.cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    assert job.end() == "COMPLETED", job.explain()
    assert job.restarts() == 1, job.explain()
    assert len(job.events(START)) == 2
    assert is_completed(tmp_path / "runs" / "bert-base-lamb-phase2"), job.explain()

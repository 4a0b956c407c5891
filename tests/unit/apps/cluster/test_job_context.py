"""What a job knows of itself: tasks a node, the arguments of its script, its settings, what it shows."""

from __future__ import annotations

import os

import pytest

from ctxlm_ds.apps.cluster.job_context import plan_tasks, pretrain_words, read_settings, show
from ctxlm_ds.errors import ConfigError


@pytest.mark.parametrize(
    ("environ", "tasks", "words"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, {"n1": 2, "n2": 2}, ()),
        ({"SLURM_TASKS_PER_NODE": "2,1"}, {"n1": 2, "n2": 1}, ()),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "1"}, {"n1": 1, "n2": 1}, ()),
        ({"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_ON_NODE": "8"}, {"n1": 4, "n2": 4}, ()),
        (
            {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "64"},
            {"n1": 8, "n2": 8}, ("--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=8"),
        ),
        (
            {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "64",
             "SLURM_JOB_CPUS_PER_NODE": "64,32"},
            {"n1": 4, "n2": 4}, ("--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=8"),
        ),
    ],
)  # fmt: skip
def test_one_task_a_gpu(environ: dict[str, str], tasks: dict[str, int], words: tuple[str, ...]) -> None:
    assert plan_tasks({"SLURM_JOB_NODELIST": "n[1-2]", **environ}) == (tasks, words)


def test_gpus_without_cpus_for_tasks_are_refused() -> None:
    environ = {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "8"}
    with pytest.raises(ConfigError, match="--ntasks-per-node=8"):
        plan_tasks({**environ, "SLURM_CPUS_ON_NODE": "1"})


def test_a_full_disk_does_not_stop_the_job_s_words(capfd: pytest.CaptureFixture[str]) -> None:
    saved = os.dup(1)
    try:
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), 1)
        show("lost")
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    show("kept …")
    assert capfd.readouterr().out == "kept …\n"


def test_the_batch_script_s_arguments() -> None:
    assert pretrain_words(["a.yaml", "--set", "x=1"]) == ("--config", "a.yaml", "--set", "x=1")
    assert pretrain_words(["--set", "x=1", "--config=a.yaml"]) == ("--set", "x=1", "--config=a.yaml")
    for wrong in ([], ["--set", "x=1", "a.yaml"]):
        with pytest.raises(ConfigError, match="no recipe; it comes first"):
            pretrain_words(wrong)
    with pytest.raises(ConfigError, match="--check needs no job: python -m ctxlm_ds.pretrain --config a.yaml --check"):
        pretrain_words(["a.yaml", "--check"])


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("CTXLM_RESTART", "successor", "CTXLM_RESTART"), ("CTXLM_MAX_RESTARTS", "0", "CTXLM_MAX_RESTARTS"),
     ("CTXLM_RESTART_DELAY_S", "soon", "CTXLM_RESTART_DELAY_S"),
     ("CTXLM_SRUN_OPTIONS", "--comment='open", "CTXLM_SRUN_OPTIONS"), ("CTXLM_PYXIS", "b.sqsh", "one of them")],
)  # fmt: skip
def test_wrong_settings_are_named(name: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings({"CTXLM_CONTAINER": "a.sif", name: value})

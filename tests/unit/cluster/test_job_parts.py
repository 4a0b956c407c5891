"""Parts of a job that need no cluster: settings, tasks, what Slurm says, time, the environment of the ranks."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest

from ctxlm_ds.cluster.job_context import plan_tasks, pretrain_words, show
from ctxlm_ds.cluster.settings import OWN_VARIABLES, VARIABLES, JobSettings, misspelt, read_settings
from ctxlm_ds.cluster.slurm_commands import Job, call, parse_fields, still_ours, stop_delay_s, time_left_s
from ctxlm_ds.cluster.srun import SrunStep, free_port, is_known_host, rank_python, srun_command, step_environment
from ctxlm_ds.cluster.successor import batch_script, successor_environment, successor_options
from ctxlm_ds.errors import ClusterError, ConfigError

# scontrol show job of Slurm 22.05, shortened
SHOWN = """\
JobId=14 JobName=my run
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=0 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:03 TimeLimit=00:30:00 TimeMin=N/A
   StartTime=2026-11-22T00:00:00 EndTime=2026-11-22T00:30:00 Deadline=N/A
   PreemptEligibleTime=2026-11-22T00:13:55 PreemptTime=None
   Partition=main AllocNode:Sid=head:3978
   ReqNodeList=(null) ExcNodeList=n[7-9]
   NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   MinCPUsNode=2 MinMemoryCPU=500M MinTmpDiskNode=0
   OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null)
   Command=/site/slurm/pretrain.sbatch recipe.yaml --set run_dir=/runs/a b=c
   WorkDir=/home/u
   Comment=of x=1
   StdOut=/home/u/ctxlm-14.log
   TresPerNode=gres:gpu:8
"""


@pytest.fixture
def job() -> Job:
    return Job("14", parse_fields(SHOWN))


def test_fields_of_a_job(job: Job) -> None:
    assert (job.state, job.restarts, job.may_requeue) == ("RUNNING", 2, False)
    assert job.given("JobName") == "my run" and job.given("Account") == "" and job.given("CPUs/Task") == "1"
    assert job.given("Comment") == "of x=1"
    assert job.given("Command") == "/site/slurm/pretrain.sbatch recipe.yaml --set run_dir=/runs/a b=c"


def test_a_successor_asks_for_the_same(job: Job) -> None:
    options = successor_options(job, {"SLURM_NTASKS_PER_NODE": "8"})
    assert {
        "--parsable", "--no-requeue", "--nodes=2", "--ntasks-per-node=8", "--gres=gpu:8", "--time=00:30:00",
        "--mem-per-cpu=500M", "--output=/home/u/ctxlm-%j.log", "--comment=of x=1",
    } <= set(options)  # fmt: skip
    assert not any(option.startswith(("--account", "--qos", "--exclusive")) for option in options)
    assert "--ntasks=4" in successor_options(job, {})


def test_a_successor_s_environment_has_nothing_of_this_job() -> None:
    found = successor_environment({"SLURM_JOB_ID": "1", "SLURM_CONF": "c", "PATH": "p", "SRUN_CPUS_PER_TASK": "2"}, "9")
    assert found == {"SLURM_CONF": "c", "PATH": "p", "CTXLM_CHAIN": "9"}


def test_the_script_is_told_from_its_arguments(job: Job, tmp_path: object) -> None:
    script = f"{tmp_path}/with space.sbatch"
    open(script, "w").close()
    shown = Job("14", {"Command": f"{script} a b=c"})
    assert batch_script(shown, ["a", "b=c"], tmp_path) == script  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "tasks", "words"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, {"n1": 2, "n2": 2}, ()),
        ({"SLURM_TASKS_PER_NODE": "2,1"}, {"n1": 2, "n2": 1}, ()),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "1"}, {"n1": 1, "n2": 1}, ()),
        ({"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_ON_NODE": "8"}, {"n1": 4, "n2": 4}, ()),
        (
            {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "64"},
            {"n1": 8, "n2": 8}, ("--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=1"),
        ),
    ],
)  # fmt: skip
def test_one_task_a_gpu(environ: dict[str, str], tasks: dict[str, int], words: tuple[str, ...]) -> None:
    assert plan_tasks({"SLURM_JOB_NODELIST": "n[1-2]", **environ}) == (tasks, words)


def test_gpus_without_cpus_for_tasks_are_refused() -> None:
    environ = {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "8"}
    with pytest.raises(ConfigError, match="--ntasks-per-node=8"):
        plan_tasks({**environ, "SLURM_CPUS_ON_NODE": "1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("CTXLM_RESTART", "perhaps"), ("CTXLM_MAX_RESTARTS", "0"), ("CTXLM_RESTART_DELAY_S", "soon"),
     ("CTXLM_SRUN_OPTIONS", "--comment='open")],
)  # fmt: skip
def test_wrong_settings_are_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_settings({name: value})


def test_two_kinds_of_containers_are_refused() -> None:
    with pytest.raises(ConfigError, match="one of them"):
        read_settings({"CTXLM_CONTAINER": "a.sif", "CTXLM_PYXIS": "b.sqsh"})


def test_ranks_in_containers() -> None:
    apptainer = JobSettings(container="a.sif", container_options=("--bind", "/d"), srun_options=("--cpu-bind=cores",))
    words = srun_command([rank_python(apptainer), "-m", "x"], apptainer)
    assert " ".join(words).endswith("--cpu-bind=cores apptainer exec --nv --bind /d a.sif python3 -m x")
    pyxis = JobSettings(pyxis="b.sqsh", pyxis_options=("--container-mounts=/d",))
    words = srun_command([rank_python(pyxis), "-m", "x"], pyxis)
    assert " ".join(words).endswith("--container-image=b.sqsh --container-mounts=/d python3 -m x")
    assert rank_python(JobSettings()) == sys.executable


def test_the_ranks_environment() -> None:
    found = step_environment({"RANK": "3", "SLURM_CPUS_PER_TASK": "8", "A": "b"}, "job-1-0-0", 15001)
    assert "RANK" not in found and found["A"] == "b" and found["CTXLM_ATTEMPT"] == "job-1-0-0"
    assert found["SRUN_CPUS_PER_TASK"] == "8", "a step of Slurm 22.05 does not take the job's --cpus-per-task by itself"
    assert found["MASTER_PORT"] == "15001"
    assert step_environment({"MASTER_PORT": "1"}, "a", 15001)["MASTER_PORT"] == "1"


def test_a_taken_port_is_passed_over() -> None:
    environ = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "77"}
    first = free_port(environ, "n1", 1)
    assert first is not None and free_port(environ, "n1", 2) != first
    with socket.socket() as taken:
        taken.bind(("", first))
        taken.listen()
        assert free_port(environ, "n1", 1) not in (None, first)
    assert free_port(environ, "n2", 1) is None, "rank 0 listens on another host"


def seconds(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def test_time_of_a_job(job: Job) -> None:
    assert time_left_s(job, seconds("2026-11-22T00:20:00")) == 600
    assert time_left_s(Job("1", {"EndTime": "Unknown"}), 0.0) == float("inf")


@pytest.mark.parametrize(
    ("limit", "now", "expected"),
    [
        ("00:05:00", "00:00:10", 215.0),  # told when a quarter of the five minutes is left
        ("00:05:00", "00:02:00", 0.0),
        ("12:00:00", "00:00:10", 0.0),  # somebody's own signal
    ],
)
def test_a_notice_at_a_short_job_s_beginning_waits(limit: str, now: str, expected: float) -> None:
    fields = {"StartTime": "2026-11-22T00:00:00", "EndTime": f"2026-11-22T{limit}"}
    assert stop_delay_s(Job("1", fields), seconds(f"2026-11-22T{now}")) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"JobState": "RUNNING", "Reason": "None"}, True),
        ({"JobState": "COMPLETING", "Reason": "None"}, False),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, True),
        ({"JobState": "COMPLETING", "Reason": "NodeDown"}, True),
        ({"JobState": "COMPLETING", "Reason": "None", "PreemptTime": "2026-11-22T00:57:14"}, True),
        ({"JobState": "CANCELLED", "Reason": "None", "PreemptTime": "None"}, False),
    ],
)
def test_whose_the_job_is(fields: dict[str, str], expected: bool) -> None:
    assert still_ours(Job("1", fields)) is expected


def test_a_command_s_failure_is_explained() -> None:
    with pytest.raises(ClusterError, match="status 3: no such thing"):
        call(["sh", "-c", "echo no such thing >&2; exit 3"])
    with pytest.raises(ClusterError, match="must be in PATH"):
        call(["scontrol-of-no-cluster"])


def test_a_step_gives_its_lines_and_takes_signals() -> None:
    lines: list[str] = []
    script = "trap 'echo told; exit 5' USR1; echo up; while :; do sleep 0.05; done"
    step = SrunStep(["bash", "-c", script], {"PATH": "/usr/bin:/bin"}, lines.append)
    while not lines:
        assert step.wait(0.05) is None
    step.stop_in_order()
    while (status := step.wait(0.05)) is None:
        pass
    assert (status, lines) == (5, ["up", "told"])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"TresPerNode": "gres:gpu:8"}, "--gres=gpu:8"),
        ({"TresPerNode": "gres:gpu:a100:4,gres:nvme:1"}, "--gres=gpu:a100:4,nvme:1"),
        ({"TresPerNode": "gres/gpu:4"}, "--gres=gpu:4"),
        ({"TresPerJob": "gres:gpu:16"}, "--gpus=16"),
        ({"TresPerTask": "gres:gpu:1"}, "--gpus-per-task=1"),
        ({"TresPerTask": "cpu=8,gres/gpu=1"}, "--gpus-per-task=1"),
    ],
)
def test_a_successor_asks_for_as_many_gpus(fields: dict[str, str], expected: str) -> None:
    assert [option for option in successor_options(Job("1", fields), {}) if "gpu" in option] == [expected]


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


def test_hosts() -> None:
    assert is_known_host("localhost") and not is_known_host("no-such-host.invalid")


def test_the_batch_script_s_arguments() -> None:
    assert pretrain_words(["a.yaml", "--set", "x=1"]) == ("--config", "a.yaml", "--set", "x=1")
    assert pretrain_words(["--set", "x=1", "--config=a.yaml"]) == ("--set", "x=1", "--config=a.yaml")
    for wrong in ([], ["--set", "x=1", "a.yaml"]):
        with pytest.raises(ConfigError, match="no recipe; it comes first"):
            pretrain_words(wrong)
    with pytest.raises(ConfigError, match="--check needs no job: python -m ctxlm_ds.pretrain --config a.yaml --check"):
        pretrain_words(["a.yaml", "--check"])


def test_misspelt_variables_are_told() -> None:
    environ = {"CTXLM_MAX_RESTART": "9", "CTXLM_RESTART": "off", "CTXLM_ATTEMPT": "x", "CTXLM_OF_OUR_SITE": "1"}
    assert misspelt(environ) == ["CTXLM_MAX_RESTART is no setting and is ignored; did you mean CTXLM_MAX_RESTARTS?"]


def test_the_list_of_variables_is_whole() -> None:
    root = Path(__file__).resolve().parents[3]
    files = [path for folder in ("ctxlm_ds", "slurm") for path in (root / folder).rglob("*") if path.is_file()]
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".sh", ".sbatch")]
    named = {name for text in texts for name in re.findall(r"CTXLM_[A-Z_]*[A-Z]", text)}
    assert named == {*VARIABLES, *OWN_VARIABLES}

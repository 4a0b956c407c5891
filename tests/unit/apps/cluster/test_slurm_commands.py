"""What Slurm says of a job, its time, whose it is, and the words that go to Slurm."""

from __future__ import annotations

import time

import pytest

from ctxlm_ds.apps.cluster.slurm_commands import Job, call, parse_fields, still_ours, stop_delay_s, time_left_s
from ctxlm_ds.errors import ClusterError

# scontrol show job of Slurm 22.05, shortened
SHOWN = """\
JobId=14 JobName=my run JobState=FAILED
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=0 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   StartTime=2026-11-22T00:00:00 EndTime=2026-11-22T00:30:00 Deadline=N/A
   ReqNodeList=(null) ExcNodeList=n[7-9]
   NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Command=/site/slurm/pretrain.sbatch recipe.yaml --set run_dir=/runs/a b=c
   Comment=of EndTime=1
   StdOut=/home/u/ctxlm-14.log
"""


@pytest.fixture
def job() -> Job:
    return Job("14", parse_fields(SHOWN))


def test_fields_of_a_job(job: Job) -> None:
    assert (job.state, job.restarts) == ("RUNNING", 2)
    assert job.given("Account") == "" and job.given("CPUs/Task") == "1"
    assert job.given("EndTime") == "2026-11-22T00:30:00"


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


def test_times_are_those_of_slurm_s_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert call(["sh", "-c", "echo $SLURM_TIME_FORMAT"]) == "standard\n"


def test_a_command_s_failure_is_explained() -> None:
    with pytest.raises(ClusterError, match="status 3: no such thing"):
        call(["sh", "-c", "echo no such thing >&2; exit 3"])
    with pytest.raises(ClusterError, match="must be in PATH"):
        call(["scontrol-of-no-cluster"])

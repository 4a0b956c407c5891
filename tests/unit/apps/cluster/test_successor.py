"""A successor asks for the same as its job, and is waited for instead; the rest is tested on a real cluster."""

from __future__ import annotations

import pytest

from ctxlm_ds.apps.cluster.slurm_commands import Job, parse_fields
from ctxlm_ds.apps.cluster.successor import batch_script, moved_dependency, successor_environment, successor_options
from tests.unit.apps.cluster.test_slurm_commands import SHOWN


@pytest.mark.parametrize(
    ("dependency", "expected"),
    [
        ("afterok:24(unfulfilled)", "afterok:29"),
        ("afterok:2(unfulfilled),afterok:24(unfulfilled)", "afterok:2,afterok:29"),
        ("afterok:24(unfulfilled),afterany:7_*(unfulfilled)", "afterok:29,afterany:7"),
        ("afterok:24(failed)", "afterok:29"),
        ("afterok:240(unfulfilled)", None),
        ("singleton(unfulfilled)", None),
        ("(null)", None),
        ("", None),
    ],
)
def test_a_dependency_on_a_job_becomes_one_on_its_successor(dependency: str, expected: str | None) -> None:
    assert moved_dependency(dependency, "24", "29") == expected


@pytest.fixture
def job() -> Job:
    return Job("14", parse_fields(SHOWN))


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

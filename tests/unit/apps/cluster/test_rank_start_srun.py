"""The step that runs the ranks: its command, environment and port, its lines and its signals."""

from __future__ import annotations

import socket
import sys

from ctxlm_ds.apps.cluster.job_context import JobSettings
from ctxlm_ds.apps.cluster.rank_start import SrunStep, free_port, is_known_host, srun_command, step_environment


def test_ranks_in_containers() -> None:
    apptainer = JobSettings(container="a.sif", container_options=("--bind", "/d"), srun_options=("--cpu-bind=cores",))
    words = srun_command([apptainer.python, "-m", "x"], apptainer)
    assert " ".join(words).endswith("--cpu-bind=cores apptainer exec --nv --bind /d a.sif python3 -m x")
    pyxis = JobSettings(pyxis="b.sqsh", pyxis_options=("--container-mounts=/d",))
    words = srun_command([pyxis.python, "-m", "x"], pyxis)
    assert " ".join(words).endswith("--container-image=b.sqsh --container-mounts=/d python3 -m x")
    assert JobSettings().python == sys.executable


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


def test_hosts() -> None:
    assert is_known_host("localhost") and not is_known_host("no-such-host.invalid")

"""srun's variables, as a real Slurm (22.05) sets them, and lists of hosts of every form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.slurm import (
    SRUN,
    VARIABLE,
    choose_gloo_interface,
    expand_hostlist,
    expand_numbers,
    expand_tasks,
    hosts_of_step,
    interface_of,
    join_numbers,
    port_of_step,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("login,n2", ["login", "n2"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("a[1-2]b[3,5],c", ["a1b3", "a1b5", "a2b3", "a2b5", "c"]),
        ("gpu-[1-2]-ib.cluster", ["gpu-1-ib.cluster", "gpu-2-ib.cluster"]),
        ("127.0.0.[11-13]", ["127.0.0.11", "127.0.0.12", "127.0.0.13"]),
        ("r1n[01],r2n[01-02]", ["r1n01", "r2n01", "r2n02"]),
    ],
)
def test_hostlist(text: str, expected: list[str]) -> None:
    assert expand_hostlist(text) == expected


@pytest.mark.parametrize("text", ["", "n[1-2", "n1-2]", "n[[1]]", "n[a-b]", "n[1-]", "n[3-1]", "n[]"])
def test_a_broken_hostlist_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="node list"):
        expand_hostlist(text)


@pytest.mark.parametrize(("text", "expected"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,4(x2)", [1, 4, 4])])
def test_tasks_per_node(text: str, expected: list[int]) -> None:
    assert expand_tasks(text) == expected


def test_broken_tasks_per_node() -> None:
    with pytest.raises(ConfigError, match="tasks per node"):
        expand_tasks("2(x")


STEP = {
    "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NAME": "python",
}  # fmt: skip


def test_a_task_of_a_step_on_part_of_the_job() -> None:
    task = SRUN.place(STEP)
    assert (task.rank, task.world_size, task.local_rank, task.local_world_size) == (2, 3, 0, 1)
    assert hosts_of_step(STEP) == ["n2", "n3"] and task.master_addr == "n2"
    first = SRUN.place({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert first.local_world_size == 2 and first.master_port == task.master_port


def test_tasks_per_node_of_the_whole_job_are_not_believed() -> None:
    assert SRUN.place({**STEP, "SLURM_STEP_TASKS_PER_NODE": ""}).local_world_size == 2
    assert SRUN.place({**STEP, "SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "1,2"}).local_world_size == 2


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_NAME": "batch"},
        {"SLURM_STEP_NAME": "interactive"},
        {"SLURM_STEP_ID": str(0xFFFFFFFB)},
        {"SLURM_STEP_ID": str(0xFFFFFFFA)},
        {"SLURM_PTY_PORT": "44053"},
        {"SLURM_STEP_ID": None},
        {"SLURM_PROCID": None},
    ],
)
def test_shells_inside_an_allocation_are_no_ranks(change: dict[str, str | None]) -> None:
    environ = {name: value for name, value in {**STEP, **change}.items() if value is not None}
    assert not SRUN.has_started(environ)
    assert SRUN.has_started(STEP)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_NTASKS": "", "SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS is missing"),
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID is 'x', a number"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID is 3 but SLURM_STEP_NUM_TASKS is 3"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST are missing"),
    ],
)
def test_incomplete_variables_are_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SRUN.place({**STEP, **change})


def test_ports_of_neighbours_differ_and_avoid_the_ephemeral_range() -> None:
    ports = [
        port_of_step({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": restart})
        for job in range(5000, 5010)
        for step in range(8)
        for restart in ("", "1", "2")
    ]
    assert len(set(ports)) == len(ports)
    many = [port_of_step({"SLURM_JOB_ID": str(job)}) for job in range(0, 10**8, 99_991)]
    assert min(many) >= 15000 and max(many) < 30000


def test_there_and_back() -> None:
    assert expand_numbers("0-2,5,7-8") == ["0", "1", "2", "5", "7", "8"]
    assert expand_numbers("08-10, 3") == ["08", "09", "10", "3"]
    assert join_numbers([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert join_numbers([0, 1, 4, 7, 8]) == "0-1,4,7-8"
    assert join_numbers([3], ", ") == "3" and join_numbers([]) == ""


@pytest.mark.parametrize("text", ["", "a", "1-", "-2", "1-2-3", "4-2", "1,,2"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number or a range|runs backwards"):
        expand_numbers(text)


ASK = (
    "import os; from ctxlm_ds.process.slurm import choose_gloo_interface as choose; "
    "print(choose(('n1', 'n2'), os.environ), os.environ.get('GLOO_SOCKET_IFNAME'))"
)


def on_a_node(tmp_path: Path, own_address: str) -> str:
    """The answer on a host n1 with an interface fab0, in namespaces of its own."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{own_address} n1\n10.9.8.2 n2\n")
    commands = [
        f"mount --bind {hosts} /etc/hosts", "hostname n1", "ip link set lo up",
        "ip link add fab0 type veth peer name fab1", "ip addr add 10.9.8.1/24 dev fab0", "ip link set fab0 up",
        "ip link set fab1 up", f'exec {sys.executable} -c "{ASK}"',
    ]  # fmt: skip
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", " && ".join(commands)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.mark.parametrize(("own_address", "answer"), [("127.0.1.1", "fab0 fab0"), ("10.9.8.1", "None None")])
def test_only_a_name_that_leads_to_loopback_is_mended(own_address: str, answer: str, tmp_path: Path) -> None:
    assert on_a_node(tmp_path, own_address) == answer


def test_what_is_set_stands() -> None:
    environ = {VARIABLE: "ib0"}
    assert choose_gloo_interface(("n1", "n2"), environ) is None and environ == {VARIABLE: "ib0"}
    assert choose_gloo_interface(("n1",), {}) is None


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") is None

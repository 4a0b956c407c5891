"""Ranks from every launcher's variables; signals; ranks that end with their launcher (real launchers, real kills)."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.launch import Launcher, RankInfo, discover_ranks, export_ranks, threads_per_rank
from ctxlm_ds.registry import LAUNCHERS
from tests.unit.process.test_slurm import STEP

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
ONE_NODE = {**STEP, "SLURM_STEP_NODELIST": "n7", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("cores", "local_ranks", "environ", "expected"),
    [
        (16, 4, {}, 4),
        (2, 4, {}, 1),
        (16, 1, {}, 16),
        (7, 2, {}, 3),
        (16, 4, {"OMP_NUM_THREADS": "6"}, 6),
        (16, 1, {"OMP_NUM_THREADS": "1"}, 1),
        # torchrun sets 1 where nobody did.
        (16, 4, {"OMP_NUM_THREADS": "1", **TORCHRUN}, 4),
        (16, 1, {"OMP_NUM_THREADS": "1", **TORCHRUN}, 1),
        (16, 4, {"OMP_NUM_THREADS": "3", **TORCHRUN}, 3),
        (16, 4, {"OMP_NUM_THREADS": "all"}, 4),
        # srun bound each task to its own 8 cores, or bound nothing.
        (8, 4, {"SLURM_CPUS_PER_TASK": "8"}, 8),
        (32, 4, {"SLURM_CPUS_PER_TASK": "8"}, 8),
    ],
)
def test_threads(cores: int, local_ranks: int, environ: dict[str, str], expected: int) -> None:
    default = LAUNCHERS.get(discover_ranks(environ).launcher).default_threads
    assert threads_per_rank(cores, local_ranks, environ, default) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, RankInfo(3, 8, 1, 2, "n1", 29500, "torchrun", 1)),
        (DEEPSPEED, RankInfo(3, 4, 1, 2, "10.0.0.1", 29500, "deepspeed", 1)),
        ({**STEP, **TORCHRUN}, RankInfo(3, 8, 1, 2, "n1", 29500, "torchrun", 1)),
        # What the script exported counts.
        ({**STEP, "MASTER_ADDR": "n2-ib", "MASTER_PORT": "12345"}, RankInfo(2, 3, 0, 1, "n2-ib", 12345, "srun", 0)),
        ({**ONE_NODE, "MASTER_PORT": "12345"}, RankInfo(2, 3, 0, 3, "127.0.0.1", 12345, "srun", 0)),
    ],
    ids=["torchrun", "deepspeed", "torchrun inside srun", "srun", "srun on one node, on the loopback"],
)
def test_ranks_of_each_launcher(environ: dict[str, str], expected: RankInfo) -> None:
    assert discover_ranks(environ) == expected


def test_a_launcher_of_another_package_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mpirun(Launcher):
        def has_started(self, environ: Mapping[str, str]) -> bool:
            return "OMPI_COMM_WORLD_RANK" in environ

        def place(self, environ: Mapping[str, str]) -> RankInfo:
            return RankInfo(int(environ["OMPI_COMM_WORLD_RANK"]), 4, 0, 1, "n1", 29500, "", 0)

    monkeypatch.setattr(LAUNCHERS, "_added", {"mpirun": Mpirun()})
    monkeypatch.setattr(LAUNCHERS, "_loaded", {})
    ranks = discover_ranks({"OMPI_COMM_WORLD_RANK": "3", **STEP})
    assert (ranks.rank, ranks.launcher) == (3, "mpirun")
    assert discover_ranks(STEP).launcher == "srun"


@pytest.mark.parametrize(("visible", "device"), [("3", 0), ("0,1", 1), ("", 1)])
def test_a_task_with_a_gpu_of_its_own_calls_it_0(visible: str, device: int) -> None:
    environ = {**STEP, "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": visible}
    ranks = discover_ranks(environ)
    assert (ranks.local_rank, ranks.device_index) == (1, device)
    exported: dict[str, str] = {}
    export_ranks(ranks, exported)
    assert exported["LOCAL_RANK"] == str(device)


def test_a_shell_in_an_allocation_is_one_process() -> None:
    """sbatch sets SLURM_PROCID=0 and SLURM_NTASKS, but no step."""
    ranks = discover_ranks({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0"})
    assert (ranks.rank, ranks.world_size, ranks.launcher) == (0, 1, "single")


def test_single_processes_get_ports_of_their_own() -> None:
    first, second = discover_ranks({}), discover_ranks({})
    assert first.launcher == "single" and first.master_port != second.master_port
    assert discover_ranks({"RANK": "0", "WORLD_SIZE": "1"}).master_addr == "127.0.0.1"


def test_exported_variables_say_the_same_again() -> None:
    for environ in (TORCHRUN, DEEPSPEED, STEP, {}):
        exported: dict[str, str] = {}
        ranks = discover_ranks(environ)
        export_ranks(ranks, exported)
        again = discover_ranks(exported)
        assert (again.rank, again.world_size, again.local_rank) == (ranks.rank, ranks.world_size, ranks.device_index)
        assert (again.local_world_size, again.master_addr) == (ranks.local_world_size, ranks.master_addr)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 but WORLD_SIZE is 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is missing"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR is missing"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT is missing"),
    ],
)
def test_incomplete_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        discover_ranks(environ)


def test_discovery_needs_no_heavy_import() -> None:
    code = "import sys, ctxlm_ds.process.launch; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


RANK_SCRIPT = """
import os, sys, time
from ctxlm_ds.process.launch import discover_ranks, export_ranks
from ctxlm_ds.process.signals import StopSignal
from ctxlm_ds.registry import LAUNCHERS

stop = StopSignal().install()
ranks = discover_ranks()
LAUNCHERS.get(ranks.launcher).prepare(ranks)
folder = sys.argv[-1]
with open(f"{folder}/rank-{ranks.rank}.new", "w") as handle:
    handle.write(f"{os.getpid()} {ranks.launcher} {ranks.world_size}")
os.rename(f"{folder}/rank-{ranks.rank}.new", f"{folder}/rank-{ranks.rank}")
while not stop.requested:
    time.sleep(0.05)
open(f"{folder}/stopped-{ranks.rank}", "w").close()
"""


@contextlib.contextmanager
def _started(
    launcher: str, folder: Path, per_node: bool = False
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start two ranks, with `per_node` by the process that DeepSpeed's launcher starts on each node."""
    script = folder / "rank.py"
    script.write_text(RANK_SCRIPT)
    binaries = Path(sys.executable).parent
    words = {
        "torchrun": [binaries / "torchrun", "--standalone", "--nproc_per_node=2"],
        "deepspeed": [binaries / "deepspeed", "--num_gpus=2", "--no_local_rank", "--master_port=29871"],
    }[launcher]
    if per_node:
        world = base64.urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
        words = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", *words[2:]]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": f"{binaries}:{os.environ['PATH']}"}
    with open(folder / "log", "wb") as log:
        command = [*map(str, words), str(script), str(folder)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
    pids: list[int] = []
    try:
        deadline_s = time.monotonic() + 90
        while not all((folder / f"rank-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline_s and process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        found = [(folder / f"rank-{rank}").read_text().split() for rank in range(2)]
        assert [words[1:] for words in found] == [[launcher, "2"]] * 2
        pids += [int(words[0]) for words in found]
        yield process, pids
    finally:
        for pid in pids:
            if not _gone([pid], 0):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _gone(pids: list[int], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(os.path.exists(f"/proc/{pid}") and "Z" not in _state(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


each_launcher = pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("torchrun", marks=pytest.mark.soak)])


@pytest.mark.dist
@each_launcher
def test_ranks_end_with_a_killed_launcher(launcher: str, tmp_path: Path) -> None:
    with _started(launcher, tmp_path) as (process, pids):
        process.kill()
        assert _gone(pids, 20)
        # torchrun is the ranks' parent: they die with it. DeepSpeed's per-node launcher lets them save first.
        assert (tmp_path / "stopped-0").exists() is (launcher == "deepspeed")


@pytest.mark.dist
@each_launcher
def test_a_terminated_launcher_lets_its_ranks_save(launcher: str, tmp_path: Path) -> None:
    with _started(launcher, tmp_path) as (process, pids):
        process.terminate()
        assert _gone(pids, 20)
        assert all((tmp_path / f"stopped-{rank}").exists() for rank in range(2))


@pytest.mark.dist
def test_the_per_node_launcher_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    with _started("deepspeed", tmp_path, per_node=True) as (process, pids):
        status = Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()
        assert int(status[1]) == process.pid
        process.kill()
        assert _gone(pids, 10)
        assert not (tmp_path / "stopped-0").exists()

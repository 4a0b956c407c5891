"""A running test cluster, for tests: the commands of a login node, and the faults that clusters have.

In: tests/slurm/testbed.sh, which makes the cluster. Out: `Cluster`, `Rank`. Not here: what a job should do (the tests).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.route import BIN, ROOT, Finished, environment

TESTBED = Path(__file__).resolve().parent / "testbed.sh"
NOT_FIT = 77  # testbed.sh's status where programs, root or namespaces are missing


def user_environment(**extra: str) -> dict[str, str]:
    """A user's environment on a login node: no launcher's and no job's variables; `extra` on top.

    The interpreter that runs the tests comes first in PATH, as an activated virtual environment would; one thread a
    process, so that sums are the same in every job.
    """
    foreign = ("SLURM", "SBATCH_", "SALLOC_", "CTXLM_", "TESTBED_")
    kept = {k: v for k, v in environment().items() if not k.startswith(foreign)}
    return {**kept, "PATH": f"{BIN}:{kept.get('PATH', '/usr/bin:/bin')}", **extra}


@dataclass(frozen=True)
class Rank:
    """A training process on a node, as the host sees it."""

    pid: int
    node: str
    rank: int
    job: str

    def send(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; a process that is gone is none of the caller's trouble."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass
class Cluster:
    """`with Cluster.started(3) as cluster`: nodes n1, n2, ... in a temporary folder of its own."""

    folder: Path
    nodes: list[str]
    settings: Mapping[str, str] = field(default_factory=dict)
    _cut: set[str] = field(default_factory=set)
    _dead: set[str] = field(default_factory=set)

    @classmethod
    @contextlib.contextmanager
    def started(cls, num_nodes: int = 3, **settings: str) -> Iterator[Cluster]:
        """Start a cluster, stop it whatever happens; `settings` are testbed.sh's (TESTBED_SSHD="1").

        The test is skipped if this machine cannot run one.
        """
        # Short and plain: munge's socket lies in it, and a socket's path has 108 bytes at most.
        folder = Path(tempfile.mkdtemp(prefix="ctxlm-slurm-", dir="/tmp"))
        folder.rmdir()
        cluster = cls(folder, [f"n{i + 1}" for i in range(num_nodes)], settings)
        try:
            begun = cluster.testbed("start", num_nodes, check=False)
            if begun.returncode == NOT_FIT:
                pytest.skip(f"no Slurm cluster can be started here: {begun.stderr.strip()}")
            assert begun.returncode == 0, f"the cluster did not start\n{begun.stderr[-8000:]}"
            yield cluster
        finally:
            cluster.testbed("stop")
            shutil.rmtree(folder, ignore_errors=True)

    def testbed(self, *words: object, check: bool = True, timeout_s: float = 180, **extra: str) -> Finished:
        """One command of testbed.sh."""
        environment = user_environment(TESTBED_DIR=str(self.folder), **self.settings, **extra)
        command = [str(word) for word in (TESTBED, *words)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check:
            assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    # ---- the login node

    def run(self, *words: object, check: bool = True, timeout_s: float = 180, **extra: str) -> Finished:
        """A command on the login node, in the repository's root; `extra` are environment variables."""
        return self.testbed("exec", *words, check=check, timeout_s=timeout_s, **extra)

    def sbatch(self, *words: object, **extra: str) -> str:
        """`sbatch --parsable WORDS...`: the job's id."""
        return self.run("sbatch", "--parsable", *words, **extra).stdout.strip().split(";")[0]

    def scontrol(self, *words: object) -> str:
        """`scontrol WORDS...`: its output."""
        return self.run("scontrol", *words).stdout

    def wait(self, job: str, timeout_s: float = 300) -> str:
        """The state in which a job ended ("COMPLETED"), or "TIMEOUT ..." if it has not after `timeout_s`."""
        return self.testbed("wait", job, int(timeout_s), check=False, timeout_s=timeout_s + 60).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """`scontrol show job` by field: JobState, Restarts, BatchHost, NodeList, StdOut, ..."""
        words = self.scontrol("-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    # ---- faults

    def kill_node(self, node: str, *, noticed: bool = False) -> None:
        """Power failure. Slurm notices after 10-20 s, or at once where an operator (`noticed`) marks the node down."""
        self._dead.add(node)
        self.testbed("kill-node", node)
        if noticed:
            self.scontrol("update", f"nodename={node}", "state=down", "reason=test")

    def start_node(self, node: str) -> None:
        """Boot a killed node; returns when Slurm uses it again."""
        self.testbed("start-node", node)
        self._dead.discard(node)

    def cut_node(self, node: str) -> None:
        """Pull the network cable; the node's processes go on."""
        self._cut.add(node)
        self.testbed("cut-node", node)

    def join_node(self, node: str) -> None:
        """Plug the network cable in again."""
        self.testbed("join-node", node)
        self._cut.discard(node)

    def node_exec(self, node: str, *words: object, check: bool = True) -> Finished:
        """Run a command inside a node."""
        return self.testbed("node-exec", node, *words, check=check)

    # ---- processes

    def pids(self, node: str) -> list[int]:
        """The host's numbers of all processes inside a node."""
        first = self.testbed("node-pid", node, check=False).stdout.strip()
        if not first:
            return []
        space = os.readlink(f"/proc/{first}/ns/pid")
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _pid_space(pid) == space]

    def ranks(self, job: str | None = None) -> list[Rank]:
        """The training processes on all nodes (of one job), without their loaders' workers, by rank."""
        found = [_as_rank(pid, node) for node in self.nodes for pid in self.pids(node)]
        return sorted((r for r in found if r and job in (None, r.job)), key=lambda rank: rank.rank)

    def launchers(self, job: str) -> list[Rank]:
        """The srun processes that started a job's ranks, on the node of its batch script."""
        found = [(pid, node) for node in self.nodes for pid in self.pids(node)]
        own = [(pid, node) for pid, node in found if command_of(pid).startswith("srun ")]
        return [Rank(pid, node, -1, job) for pid, node in own if _environment(pid).get("SLURM_JOB_ID") == job]

    def strays(self) -> list[str]:
        """Command lines of all processes on the nodes that are neither the node's own nor Slurm's."""
        lines = [(node, pid, command_of(pid)) for node in self.nodes for pid in self.pids(node)]
        own = ("slurmd", "slurmstepd", "sleep infinity", f"bash {TESTBED}", "sshd")
        return [f"{node}: {pid} {line}" for node, pid, line in lines if line and not line.startswith(own)]

    def assert_no_strays(self, timeout_s: float = 20) -> None:
        """Every process of a job is gone (within the time Slurm takes to end a step)."""
        deadline_s = time.monotonic() + timeout_s
        while left := self.strays():
            assert time.monotonic() < deadline_s, f"processes left behind: {left}"
            time.sleep(0.2)

    # ---- between tests

    def heal(self) -> None:
        """No jobs, and every node up, joined and idle: what the next test may rely on."""
        for job in self.run("squeue", "-h", "-o", "%A").stdout.split():
            self.run("scancel", "--signal=KILL", "--full", job, check=False)
            self.run("scancel", job, check=False)
        for node in sorted(self._cut):
            self.join_node(node)
        for node in sorted(self._dead):
            self.start_node(node)
        deadline_s = time.monotonic() + 90
        while set((states := self._states()).values()) != {"idle"}:
            assert time.monotonic() < deadline_s, f"the nodes do not get idle: {states}\n{self.describe()}"
            for node in (node for node, state in states.items() if "drain" in state or "down" in state):
                self.scontrol("update", f"nodename={node}", "state=resume")
            time.sleep(0.2)

    def describe(self) -> str:
        """Nodes, jobs and the end of the controller's log."""
        shown = [self.run(*words, check=False).stdout for words in (("scontrol", "show", "node"), ("squeue", "-a"))]
        log = (self.folder / "log" / "slurmctld.log").read_text(errors="replace")
        return "\n".join([*shown, log[-3000:]])

    def _states(self) -> dict[str, str]:
        """idle, mixed, down, idle+drain, ... by node; sinfo would show what it was some moments ago."""
        lines = self.scontrol("-o", "show", "node", ",".join(self.nodes)).splitlines()
        fields = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line]
        return {found["NodeName"]: found["State"].lower() for found in fields}


def _pid_space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""  # gone meanwhile


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # gone meanwhile


def command_of(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ").strip()


def _environment(pid: int) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in _read(pid, "environ").split("\0") if "=" in pair)


def _parent(pid: int) -> int:
    words = _read(pid, "stat").rpartition(")")[2].split()
    return int(words[1]) if words else 0


def _is_pretraining(command: str) -> bool:
    return "-m ctxlm_ds.pretrain" in command and not command.startswith("srun")


def _as_rank(pid: int, node: str) -> Rank | None:
    """The rank that this process is; None for others, among them srun, and a loader's worker (a rank's child)."""
    if not _is_pretraining(command_of(pid)) or _is_pretraining(command_of(_parent(pid))):
        return None
    found = _environment(pid)
    if "SLURM_PROCID" not in found:
        return None
    return Rank(pid, node, int(found["SLURM_PROCID"]), found.get("SLURM_JOB_ID", ""))

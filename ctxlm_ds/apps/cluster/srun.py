"""One srun of the ranks, or of a step before them: its command and environment, its output, signals for it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxlm_ds.apps.cluster.rank_output import job_log
from ctxlm_ds.apps.cluster.settings import JobSettings
from ctxlm_ds.errors import ClusterError
from ctxlm_ds.process.slurm import FIRST_PORT, NUM_PORTS

PORTS_TO_TRY = 50
PORT_STRIDE = 37
LAST_OUTPUT_S = 30.0
ENDING_S = 10.0
POLL_S = 0.1
NODE_MARK = "ctxlm-node "
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def wrap_in_container(words: Sequence[str], settings: JobSettings) -> tuple[list[str], list[str]]:
    """Return srun's options and the words that it runs, in the image of the settings if there is one."""
    if settings.pyxis:
        return [f"--container-image={settings.pyxis}", *settings.pyxis_options], list(words)
    if settings.container:
        return [], ["apptainer", "exec", "--nv", *settings.container_options, settings.container, *words]
    return [], list(words)


def rank_python(settings: JobSettings) -> str:
    """Return the interpreter that runs the ranks."""
    return settings.container_python if settings.container or settings.pyxis else sys.executable


def srun_command(words: Sequence[str], settings: JobSettings, *options: str) -> list[str]:
    """Return srun of `words` in the job's allocation, inside the container if there is one."""
    container_options, inside = wrap_in_container(words, settings)
    return [
        "srun", "--kill-on-bad-exit=1", "--label", "--export=ALL", *container_options, *settings.srun_options, *options,
        *inside,
    ]  # fmt: skip


def step_environment(environ: Mapping[str, str], attempt: str, port: int | None) -> dict[str, str]:
    """Return the batch script's environment for the ranks: without other launchers' variables, with this start's name.

    `port` is where rank 0 listens; None leaves the choice to the ranks or to slurm/env.sh.
    """
    kept = {key: value for key, value in environ.items() if key not in LAUNCHER_VARIABLES}
    kept.update(CTXLM_ATTEMPT=attempt, PYTHONUNBUFFERED="1")
    log = job_log()
    if log is not None:
        # For ctxlm status; the ranks' output goes through srun.
        kept["CTXLM_LOG_FILE"] = log
    if "SLURM_CPUS_PER_TASK" in kept:
        # Since 22.05 a step does not inherit the job's --cpus-per-task.
        kept.setdefault("SRUN_CPUS_PER_TASK", kept["SLURM_CPUS_PER_TASK"])
    if port is not None:
        kept.setdefault("MASTER_PORT", str(port))
    return kept


def free_port(environ: Mapping[str, str], first_node: str, try_number: int) -> int | None:
    """Return a port that is free here, different for neighbouring jobs, restarts and tries.

    None if this is not the host of rank 0 (`first_node`); the ranks then use the step's id.
    """
    if environ.get("SLURMD_NODENAME") != first_node:
        return None
    start = int(environ["SLURM_JOB_ID"]) * 101 + int(environ.get("SLURM_RESTART_COUNT") or "0") + try_number * 7
    for offset in range(PORTS_TO_TRY):
        port = FIRST_PORT + (start + offset * PORT_STRIDE) % NUM_PORTS
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
    return None


def is_known_host(name: str) -> bool:
    """Return whether a node's name in Slurm is a host's name as well; else the ranks need its address."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


class SrunStep:
    """A running srun; `on_line` is called with each line of its output, from one thread."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        try:
            self._process = subprocess.Popen(
                list(command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1,
            )  # fmt: skip
        except FileNotFoundError:
            raise ClusterError("srun: not found; Slurm's commands must be in PATH on the compute nodes") from None
        self._reader = threading.Thread(target=self._read, args=(on_line,), name="srun-output", daemon=True)
        self._reader.start()

    def _read(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            on_line(line.rstrip("\n"))

    def stop_in_order(self) -> None:
        """Let every rank save and stop, by USR1, because srun itself ends at TERM."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def wait(self, timeout_s: float) -> int | None:
        """Return srun's exit status when all its output has been read (negative: a signal); None if it still runs."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(timeout=LAST_OUTPUT_S)
        return status

    def end(self) -> None:
        """End srun if it runs, which ends its tasks."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                self.wait(ENDING_S)


def run_on_nodes(
    module: str, words: Sequence[str], tasks: Mapping[str, int], settings: JobSettings, environ: Mapping[str, str],
    limit_s: float, should_stop: Callable[[], bool],
) -> tuple[list[dict[str, Any]], list[str]]:  # fmt: skip
    """Run `python -m MODULE WORDS` as a step of so many tasks per node, for a limited time.

    Returns:
        The records that its tasks print as NODE_MARK and JSON, with `received_unix_s`; all other lines.
    """
    records: list[dict[str, Any]] = []
    other: list[str] = []

    def on_line(line: str) -> None:
        _, mark, text = line.partition(NODE_MARK)
        if not mark:
            other.append(line)
        with contextlib.suppress(ValueError):
            records.append({**json.loads(text), "received_unix_s": time.time()})

    counts = set(tasks.values())
    options = [
        "--kill-on-bad-exit=0", "--overlap", "--distribution=block", f"--job-name=ctxlm-{module.rpartition('.')[2]}",
        f"--nodes={len(tasks)}", f"--ntasks={sum(tasks.values())}", f"--nodelist={','.join(tasks)}",
        *([f"--ntasks-per-node={min(counts)}"] if len(counts) == 1 else []),
    ]  # fmt: skip
    step = SrunStep(srun_command([rank_python(settings), "-m", module, *words], settings, *options), environ, on_line)
    end_s = time.monotonic() + limit_s
    while step.wait(POLL_S) is None and time.monotonic() < end_s and not should_stop():
        pass
    step.end()
    return list(records), other

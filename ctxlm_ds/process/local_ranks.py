"""`--ranks N`: the ranks of a run on this machine, as processes of this one, which says nothing itself.

As under torchrun, a rank that fails ends the others. Ctrl-C reaches every process of the terminal; ranks save and end
by themselves, and this process waits for them. If it is killed, the kernel kills them (launchers.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.launch import RankInfo, free_port
from ctxlm_ds.process.launchers import Environment, die_with_launcher
from ctxlm_ds.process.signals import STOP_SIGNALS
from ctxlm_ds.process.slurm import is_srun_task, read_task

GRACE_S = 30.0
"""How long ranks may take to end after one has failed."""
STOP_S = 600.0
"""How long they may take after one has ended because of a stop signal."""
STOPPED = {128 + number for number in STOP_SIGNALS}
POLL_S = 0.1
LOCAL_RANKS = "CTXLM_LOCAL_RANKS"  # variable of the ranks
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


class LocalRanks(Environment):
    """This command with `--ranks N`."""

    returns_status = True

    def has_started(self, environ: Mapping[str, str]) -> bool:
        return super().has_started(environ) and LOCAL_RANKS in environ

    def prepare(self, ranks: RankInfo) -> None:
        die_with_launcher(watch_grandparent=False)


RANKS = LocalRanks()


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a launcher has started this process as a rank."""
    named = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if named or (is_srun_task(environ) and read_task(environ).world_size > 1):
        why = f"{named[0]} is set" if named else "srun has started this process"
        raise ConfigError(f"--ranks starts ranks, but this process is a launcher's rank ({why}): leave --ranks out")


def without_ranks(words: Sequence[str]) -> list[str]:
    """Return a command's arguments without `--ranks N`."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == "--ranks":
            next(rest, None)
        elif not word.startswith("--ranks="):
            kept.append(word)
    return kept


def run_ranks(command: Sequence[str], num_ranks: int) -> int:
    """Run a command once for each rank; return 0, or the exit status of the rank that failed first or was stopped.

    Raises ConfigError if a launcher has started this process as a rank.
    """
    check_alone(os.environ)
    ranks = _Ranks()
    # Functions, not SIG_IGN, which the ranks would inherit.
    signal.signal(signal.SIGINT, ranks.interrupted)
    for number in FORWARDED:
        signal.signal(number, ranks.forward)
    ranks.start(command, num_ranks)
    return ranks.wait()


class _Ranks:
    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._received: list[int] = []
        """Signals that came; ranks that are started after them get them too."""

    def start(self, command: Sequence[str], num_ranks: int) -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), LOCAL_RANKS: str(os.getpid())}
        sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        for rank in range(num_ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._processes.append(subprocess.Popen(command, env={**os.environ, **meeting, **sizes, **place}))
            for number in self._received:
                self._processes[-1].send_signal(number)

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """Record Ctrl-C, which the terminal sends to the ranks too."""
        self._received.append(number)

    def forward(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(number)

    def wait(self) -> int:
        failed, end_s = 0, float("inf")
        while any([process.poll() is None for process in self._processes]):
            if not failed and (failed := self._first_failure()):
                self.forward(signal.SIGTERM, None)
            has_stopped = any(process.returncode in STOPPED for process in self._processes)
            limit_s = GRACE_S if failed else STOP_S if has_stopped else float("inf")
            end_s = min(end_s, time.monotonic() + limit_s)
            if time.monotonic() > end_s:
                self.forward(signal.SIGKILL, None)
            time.sleep(POLL_S)
        return failed or self._first_failure() or max(int(process.returncode) for process in self._processes)

    def _first_failure(self) -> int:
        """Return the exit status of a rank that has failed, as a shell gives it; 0 if none has.

        The status of a stop signal is no failure, unless a second Ctrl-C ended the rank immediately.
        """
        hurry = self._received.count(signal.SIGINT) > 1
        for rank, process in enumerate(self._processes):
            status = process.returncode
            if status in STOPPED and not hurry:
                continue
            if status is not None and status < 0:
                sys.stderr.write(f"rank {rank} was ended by {signal.Signals(-status).name}\n")
            if status:
                return status if status > 0 else 128 - status
        return 0

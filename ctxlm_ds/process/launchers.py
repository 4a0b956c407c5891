"""The launchers of this package, except srun (slurm.py), and the ties of ranks to them.

Ranks end with their launcher: otherwise kill -9 of it would leave them computing and writing with nobody in charge.
torchrun and DeepSpeed's per-node launcher are a rank's parent: the kernel kills the rank when it dies. The `deepspeed`
command itself is the per-node launcher's parent and has no such tie: the first rank of a node watches it and asks the
per-node launcher to stop, which gives the ranks half a minute to save. On nodes that it started over ssh (pdsh), an
sshd is in its place, which ends with the connection.

Ctrl-C reaches every process of a terminal's foreground group. Ranks save and stop by themselves, but the `deepspeed`
command ends with a traceback and torchrun with another, so that the first rank of a node takes the terminal
(take_terminal) or ends these commands in silence. The process of `--ranks N` waits for its ranks; as under torchrun, a
rank that fails ends the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from ctxlm_ds.console import logger
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.cgroups import read_text
from ctxlm_ds.process.launch import Launcher, RankInfo, export_ranks, free_port
from ctxlm_ds.process.run_lock import process_fields
from ctxlm_ds.process.signals import STOP_SIGNALS, interrupted
from ctxlm_ds.process.slurm import SRUN, read_number

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PR_SET_PDEATHSIG = 1
WATCH_INTERVAL_S = 0.5
SIBLINGS_S = 15.0
NODE_LAUNCHER = "deepspeed.launcher.launch"
GRACE_S = 30.0
"""How long the ranks of --ranks may take to end after one has failed."""
STOP_S = 600.0
"""How long they may take after one has ended because of a stop signal."""
STOPPED = {128 + number for number in STOP_SIGNALS}
POLL_S = 0.1
LOCAL_RANKS = "CTXLM_LOCAL_RANKS"  # variable of the ranks


class Single(Launcher):
    """No launcher: a process alone."""

    returns_status = True

    def has_started(self, environ: Mapping[str, str]) -> bool:
        return True

    def place(self, environ: Mapping[str, str]) -> RankInfo:
        return RankInfo(0, 1, 0, 1, "127.0.0.1", free_port(), "", 0)


class Environment(Launcher):
    """A launcher without an entry, or a person, that sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_*.

    ConfigError if one is missing, is no number, or contradicts another.
    """

    variable = ""
    """One more variable that a launcher with an entry sets."""

    def has_started(self, environ: Mapping[str, str]) -> bool:
        return ("RANK" in environ or "WORLD_SIZE" in environ) and (not self.variable or self.variable in environ)

    def place(self, environ: Mapping[str, str]) -> RankInfo:
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        alone = world_size == 1
        if rank >= world_size:
            raise ConfigError(f"RANK is {rank} but WORLD_SIZE is {world_size}; unset both to run one process")
        local_rank = _number(environ, "LOCAL_RANK", "0" if alone else "")
        address = environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else "")
        if not address:
            raise ConfigError("MASTER_ADDR is missing although WORLD_SIZE is set; set it to the host of rank 0")
        port = free_port() if alone and "MASTER_PORT" not in environ else _number(environ, "MASTER_PORT")
        # DeepSpeed's launcher says LOCAL_SIZE.
        unknown = str(world_size if address in LOOPBACK else 1)
        local_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "LOCAL_SIZE"
        local_world_size = _number(environ, local_name, unknown)
        return RankInfo(rank, world_size, local_rank, local_world_size, address, port, "", local_rank)


class Torchrun(Environment):
    """torchrun, which prints the traceback of a SignalException when it is interrupted."""

    variable = "TORCHELASTIC_RUN_ID"
    default_threads = "1"
    second_interrupts = (signal.SIGINT, signal.SIGTERM)

    def prepare(self, ranks: RankInfo) -> None:
        die_with_launcher(watch_grandparent=False)

    def finish(self, ranks: RankInfo, was_interrupted: bool) -> None:
        if was_interrupted and ranks.local_rank == 0:
            _end_torchrun()


class DeepSpeed(Environment):
    """The `deepspeed` command, or its per-node launcher."""

    variable = "CROSS_RANK"

    def prepare(self, ranks: RankInfo) -> None:
        die_with_launcher(watch_grandparent=ranks.local_rank == 0)
        if ranks.local_rank == 0:
            take_terminal()


class LocalRanks(Environment):
    """This command with `--ranks N`."""

    variable = LOCAL_RANKS
    returns_status = True

    def prepare(self, ranks: RankInfo) -> None:
        die_with_launcher(watch_grandparent=False)


SINGLE, ENVIRONMENT, TORCHRUN, DEEPSPEED, RANKS = Single(), Environment(), Torchrun(), DeepSpeed(), LocalRanks()


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    remedy = "start with deepspeed, torchrun or srun, or unset RANK and WORLD_SIZE to run one process"
    return read_number(environ, name, default, remedy)


def die_with_launcher(watch_grandparent: bool, parent: int | None = None) -> None:
    """Tie this process's life to its parent's, whose number may be known; a parent that died before is noticed then.

    SIGKILL, because a rank that waits in a collective for a dead peer handles no other signal, and because what it
    leaves behind is safe: checkpoints are complete or absent and the run's lock is taken over. With
    `watch_grandparent` the rank also ends when the `deepspeed` command above the parent ends.
    """
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        logger.warning("cannot tie this rank to its launcher: %s", os.strerror(ctypes.get_errno()))
    elif os.getppid() != parent:
        # It died before the kernel knew of the tie.
        os.kill(os.getpid(), signal.SIGKILL)
    ties = launcher_ties(parent) if watch_grandparent else []
    if ties:
        threading.Thread(target=_watch, args=(parent, ties), name="launcher-watch", daemon=True).start()


def launcher_ties(parent: int) -> list[tuple[int, int]]:
    """Return the processes above a per-node launcher, each as (child, parent), that must stay what they are."""
    above = parent_of(parent) or 0
    text = command_line(above)
    if not (_is_sshd(text) or "deepspeed" in text):
        return []
    ties = [(parent, above)]
    # A shell that sshd started stays in between if it does not replace itself. A command that was started over ssh by
    # hand is not tied to the connection: it may be meant to outlive it.
    further = parent_of(above) if NODE_LAUNCHER in text else None
    if further is not None and _is_sshd(command_line(further)):
        ties.append((above, further))
    return ties


def _is_sshd(text: str) -> bool:
    """Return whether a command line is a connection's (`sshd: root@notty`, since OpenSSH 9.8 `sshd-session: ...`)."""
    return text.startswith(("sshd: ", "sshd-session: "))


def _watch(parent: int, ties: list[tuple[int, int]]) -> None:
    command = local_deepspeed_command()
    while all(parent_of(child) == above for child, above in ties):
        if interrupted.wait(WATCH_INTERVAL_S):
            with contextlib.suppress(OSError):
                # Interrupted as well, it would print a traceback and end.
                if command and os.getpgid(command) == os.getpgrp():
                    os.kill(command, signal.SIGKILL)
            return
    if os.getppid() == parent and not interrupted.is_set():
        logger.error("the deepspeed command, or the connection to it, has ended; its ranks stop")
        os.kill(parent, signal.SIGTERM)


# Ctrl-C


def local_deepspeed_command() -> int:
    """Return the process of the `deepspeed` command that started this rank on this machine; 0 if there is none."""
    above = parent_of(os.getppid()) or 0
    text = command_line(above)
    return above if "deepspeed" in text and not _is_sshd(text) else 0


def take_terminal() -> None:
    """Make this process the foreground group of its terminal instead of the `deepspeed` command.

    Only if that command is a job of the terminal's shell. Ctrl-C then reaches this rank alone: it saves with the
    others and ends, the launchers end in order after it, and the shell takes its terminal back. Ctrl-Z has no effect.
    """
    command = local_deepspeed_command()
    if not command or os.getpgrp() != command:
        return
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    with contextlib.suppress(OSError):
        if os.tcgetpgrp(terminal) == command:
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)
            os.setpgid(0, 0)
            os.tcsetpgrp(terminal, os.getpgrp())
    os.close(terminal)


def _end_torchrun() -> None:
    """Kill torchrun when all its ranks but this one have ended: it would print the traceback of a SignalException."""
    parent, end_s = os.getppid(), time.monotonic() + SIBLINGS_S
    while time.monotonic() < end_s:
        children = map(int, read_text(Path(f"/proc/{parent}/task/{parent}/children")).split())
        if [child for child in children if parent_of(child) == parent] == [os.getpid()]:
            break
        time.sleep(0.05)
    if os.getppid() == parent and "torch" in command_line(parent):
        os.kill(parent, signal.SIGKILL)


# --ranks


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a launcher has started this process as a rank."""
    named = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if named or (SRUN.has_started(environ) and SRUN.place(environ).world_size > 1):
        why = f"{named[0]} is set" if named else "srun has started this process"
        raise ConfigError(f"--ranks starts ranks, but this process is a launcher's rank ({why}): leave --ranks out")


def run_ranks(command: Sequence[str], num_ranks: int) -> int:
    """Run a command once for each rank; return 0, or the exit status of the rank that failed first or was stopped.

    Raises ConfigError if a launcher has started this process as a rank.
    """
    check_alone(os.environ)
    ranks = _Ranks()
    for number in STOP_SIGNALS:
        signal.signal(number, ranks.forward)
    ranks.start(command, num_ranks)
    return ranks.wait()


class _Ranks:
    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._received: list[int] = []
        """Signals that came; ranks that are started after them get them too."""

    def start(self, command: Sequence[str], num_ranks: int) -> None:
        environ, port = os.environ | {LOCAL_RANKS: str(os.getpid())}, free_port()
        for rank in range(num_ranks):
            export_ranks(RankInfo(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, "", rank), environ)
            self._processes.append(subprocess.Popen(command, env=environ))
            for number in self._received:
                self._processes[-1].send_signal(number)

    def forward(self, number: int, frame: FrameType | None = None) -> None:
        """Pass a signal on, except Ctrl-C, which the terminal sends to the ranks too."""
        self._received.append(number)
        for process in self._processes if number != signal.SIGINT else ():
            process.send_signal(number)

    def wait(self) -> int:
        failed, end_s = 0, float("inf")
        while any([process.poll() is None for process in self._processes]):
            if not failed and (failed := self._first_failure()):
                self.forward(signal.SIGTERM)
            has_stopped = any(process.returncode in STOPPED for process in self._processes)
            limit_s = GRACE_S if failed else STOP_S if has_stopped else float("inf")
            end_s = min(end_s, time.monotonic() + limit_s)
            if time.monotonic() > end_s:
                self.forward(signal.SIGKILL)
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


# Processes of this machine


def parent_of(pid: int) -> int | None:
    """Return the parent of a process of this machine; None if it has ended or is a zombie."""
    fields = process_fields(pid)
    return int(fields[1]) if fields else None


def command_line(pid: int) -> str:
    """Return a process's words with spaces between; empty if it has ended."""
    return read_text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")

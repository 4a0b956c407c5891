"""Ranks end with their launcher: otherwise kill -9 of it would leave them computing and writing with nobody in charge.

torchrun and DeepSpeed's per-node launcher are a rank's parent: the kernel kills the rank when it dies. The `deepspeed`
command itself is the per-node launcher's parent and has no such tie: the first rank of a node watches it and asks the
per-node launcher to stop, which gives the ranks half a minute to save. On nodes that it started over ssh (pdsh), an
sshd stands in its place, which ends with the connection; nothing else would tell these ranks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

logger = logging.getLogger("ctxlm_ds")

PR_SET_PDEATHSIG = 1
WATCH_INTERVAL_S = 0.5
NODE_LAUNCHER = "deepspeed.launcher.launch"


def die_with_launcher(watch_grandparent: bool) -> None:
    """Tie this process's life to its parent's (Linux).

    SIGKILL, because a rank that waits in a collective for a dead peer handles no other signal, and because what it
    leaves behind is safe: checkpoints are complete or absent and the run's lock is taken over.

    Args:
        watch_grandparent: also end when the `deepspeed` command above the parent is gone.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        logger.warning("cannot tie this rank to its launcher: %s", os.strerror(ctypes.get_errno()))
    elif os.getppid() != parent:
        # It died before the kernel knew of the wish.
        os.kill(os.getpid(), signal.SIGKILL)
    if watch_grandparent:
        ties = launcher_ties(parent)
        if ties:
            threading.Thread(target=_watch, args=(parent, ties), name="launcher-watch", daemon=True).start()


def launcher_ties(parent: int) -> list[tuple[int, int]]:
    """Processes above a per-node launcher, each as (child, parent), that must stay what they are.

    Args:
        parent: the per-node launcher.
    """
    above = parent_of(parent)
    text = "" if above is None else command_line(above)
    if above is None or not (_is_sshd(text) or "deepspeed" in text):
        return []
    ties = [(parent, above)]
    # A shell that sshd started stays in between where it does not replace itself. A command that was started over ssh
    # by hand is not tied to the connection: it may be meant to outlive it.
    further = parent_of(above) if NODE_LAUNCHER in text else None
    if further is not None and _is_sshd(command_line(further)):
        ties.append((above, further))
    return ties


def _is_sshd(text: str) -> bool:
    """Whether a command line is that of a connection (`sshd: root@notty`, since OpenSSH 9.8 `sshd-session: ...`)."""
    return text.startswith(("sshd: ", "sshd-session: "))


def _watch(parent: int, ties: list[tuple[int, int]]) -> None:
    while all(parent_of(child) == above for child, above in ties):
        time.sleep(WATCH_INTERVAL_S)
    if os.getppid() == parent:
        logger.error("the deepspeed command, or the connection to it, is gone; its ranks stop")
        os.kill(parent, signal.SIGTERM)


def parent_of(pid: int) -> int | None:
    """The parent of a process of this machine; None when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def command_line(pid: int) -> str:
    """A process's words with spaces between; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""

"""Ranks end with their launcher: otherwise kill -9 of it would leave them computing and writing with nobody in charge.

torchrun and DeepSpeed's per-node launcher are a rank's parent: the kernel kills the rank when it dies. The `deepspeed`
command itself is the per-node launcher's parent and has no such tie: the first rank of a node watches it and asks the
per-node launcher to stop, which gives the ranks half a minute to save.
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
        grandparent = parent_of(parent)
        if grandparent is not None and "deepspeed" in command_line(grandparent):
            arguments = (parent, grandparent)
            threading.Thread(target=_watch, args=arguments, name="launcher-watch", daemon=True).start()


def _watch(parent: int, grandparent: int) -> None:
    while parent_of(parent) == grandparent:
        time.sleep(WATCH_INTERVAL_S)
    if os.getppid() == parent:
        logger.error("the deepspeed command (process %d) is gone; its ranks stop", grandparent)
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

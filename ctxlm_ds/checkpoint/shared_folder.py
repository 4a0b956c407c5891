"""Waiting for what another host has made on a shared file system, which may show it a while late."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ctxlm_ds.errors import CheckpointError

WAIT_S = 60.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 2.0


def wait_until(is_there: Callable[[], bool], path: Path, what: str) -> None:
    """Look, ever more rarely, until `is_there()`.

    Raises:
        CheckpointError: after a minute: the path, `what` of it ("was made by rank 0"), and this host.
    """
    deadline_s = time.monotonic() + WAIT_S
    pause_s = FIRST_LOOK_S
    while not is_there():
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"{path} {what} and is not to be seen on {socket.gethostname()}: the run directory must lie on storage "
                "that all nodes share"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        # Opening the folder above makes NFS ask its server anew.
        with suppress(OSError), os.scandir(path.parent):
            pass


def holds(path: Path, text: str) -> bool:
    """Whether a file can be read and has the text in it."""
    try:
        return text in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False

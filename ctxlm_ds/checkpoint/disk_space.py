"""Whether a checkpoint can be written: every node's view of the folder, its free space, and what may go to make room.

In: the folder of the checkpoints. Out: a NodeView from each node, an error that says what is missing and where.
Not here: which checkpoints rotation keeps (folders.py).
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctxlm_ds.errors import CheckpointError

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    **dict.fromkeys(FULL_DISK_ERRORS, "free space there or raise the quota"),
    errno.EROFS: "it is mounted read-only; have it mounted for writing",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ESTALE: "the file server forgot the folder; have it mounted again on that node",
    errno.EIO: "the disk or its server fails; look at that node's kernel log",
}


@dataclass(frozen=True)
class NodeView:
    """What one node sees of the folder of the checkpoints."""

    host: str
    free_bytes: int = 0
    problem: str | None = None
    """Why nothing can be written there."""


def explain(error: Exception) -> str:
    """An error in one line: what, which file, which host, and what to do where that is known."""
    if not isinstance(error, OSError):
        return str(error)
    where = f" ({error.filename})" if error.filename else ""
    text = f"{error.strerror or error}{where} on {socket.gethostname()}"
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{text}; {remedy}" if remedy else text


def is_full_disk(error: Exception) -> bool:
    """Whether an error is want of space, of quota, or of the permitted size of a file."""
    return isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS


def look(directory: Path) -> NodeView:
    """This node's view of a folder, or of the nearest one above that exists."""
    host = socket.gethostname()
    try:
        while not directory.exists():
            directory = directory.parent
        if os.statvfs(directory).f_flag & os.ST_RDONLY:
            return NodeView(host, problem=explain(OSError(errno.EROFS, os.strerror(errno.EROFS), str(directory))))
        if not os.access(directory, os.W_OK | os.X_OK):
            return NodeView(host, problem=explain(OSError(errno.EACCES, os.strerror(errno.EACCES), str(directory))))
        return NodeView(host, shutil.disk_usage(directory).free)
    except OSError as error:
        return NodeView(host, problem=explain(error))


def check_writable(views: Iterable[NodeView]) -> None:
    """All nodes can write.

    Raises:
        CheckpointError: names the first that cannot.
    """
    for view in views:
        if view.problem is not None:
            raise CheckpointError(view.problem)


def least_free(views: Iterable[NodeView]) -> NodeView:
    """The view of the node that sees least room."""
    return min(views, key=lambda view: view.free_bytes)


def enough_to_remove(candidates: Sequence[tuple[Path, int]], missing_bytes: int) -> list[Path]:
    """The first of the candidates (folder, bytes) whose removal makes the room; none where all are too small."""
    chosen, found_bytes = [], 0
    for folder, size_bytes in candidates:
        if found_bytes >= missing_bytes:
            break
        chosen.append(folder)
        found_bytes += size_bytes
    return chosen if found_bytes >= missing_bytes else []

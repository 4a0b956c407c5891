"""The folders under RUN/checkpoints: their names and states, room on their disk, what every node sees of them.

In: a directory. Out: its checkpoints by step, the ones that rotation removes, a NodeView from each node. Not here: what
a checkpoint holds (training.py), its checksums (manifest.py).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ctxlm_ds.atomic import FULL_DISK_ERRORS, PARTIAL_MARK
from ctxlm_ds.checkpoint.manifest import Manifest, read_manifest, verify
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import CheckpointError

logger = logging.getLogger("ctxlm_ds")

CHECKPOINTS_DIR = "checkpoints"
LATEST_NAME = "latest"
PARTIAL_SUFFIX = ".partial"
REMOVING_SUFFIX = ".removing"
_STEP_NAME = re.compile(r"step-(\d{8,})")
WAIT_S = 60.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 2.0
_REMEDIES = {
    **dict.fromkeys(FULL_DISK_ERRORS, "free space there or raise the quota"),
    errno.EROFS: "it is mounted read-only; have it mounted for writing",
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.ESTALE: "the file server forgot the folder; have it mounted again on that node",
    errno.EIO: "the disk or its server fails; look at that node's kernel log",
}


def step_name(step: int) -> str:
    """`100` -> `step-00000100`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """`…/step-00000100` -> 100."""
    match = _STEP_NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """Folders under their final name by step, ascending; whether they are intact is verify()'s business."""
    found = {}
    if directory.is_dir():
        for path in directory.iterdir():
            match = _STEP_NAME.fullmatch(path.name)
            if match and path.is_dir():
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def read_latest(directory: Path) -> str | None:
    """The folder name that `latest` holds, if it is there."""
    try:
        return (directory / LATEST_NAME).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class IntactSearch:
    """Result of looking for a checkpoint to continue from."""

    newest: Path | None
    """Newest checkpoint that verifies; None where there is no checkpoint at all."""
    damaged: tuple[Path, ...]
    """Newer ones that do not verify."""


def find_newest_intact(directory: Path, check: Callable[[Path], Manifest] = verify) -> IntactSearch:
    """Verify from the newest checkpoint down until one is intact, warning about each damaged one.

    `latest` is a hint only: a crash between the last rename and its move leaves it behind. `check` verifies one folder.

    Raises:
        CheckpointError: there are checkpoints and all of them are damaged.
    """
    folders = list_checkpoints(directory)
    if not folders:
        return IntactSearch(None, ())
    latest = read_latest(directory)
    newest = folders[max(folders)].name
    if latest != newest:
        logger.info("%s names %s, the newest checkpoint is %s", directory / LATEST_NAME, latest or "nothing", newest)
    damaged: list[Path] = []
    reasons: list[str] = []
    for step in sorted(folders, reverse=True):
        started_s = time.monotonic()
        try:
            manifest = check(folders[step])
            if manifest.step != step:
                raise CheckpointError(f"{folders[step]} is damaged: its manifest is that of step {manifest.step}")
        except CheckpointError as error:
            logger.warning("%s; it will not be used", error)
            damaged.append(folders[step])
            reasons.append(str(error))
            continue
        took = format_duration(time.monotonic() - started_s)
        logger.info("verified %s (%.1f MB in %s)", folders[step], manifest.total_bytes / 1e6, took)
        return IntactSearch(folders[step], tuple(damaged))
    raise CheckpointError(
        f"no checkpoint in {directory} is intact: "
        + "; ".join(reasons)
        + f". Restore one from a copy; a run must not start over unasked, so move {directory} away to start it from "
        "the beginning"
    )


def remove_folder(path: Path) -> None:
    """Remove a checkpoint in a way that never leaves half of it under a checkpoint's name."""
    if not path.name.endswith((REMOVING_SUFFIX, PARTIAL_SUFFIX)):
        doomed = path.with_name(path.name + REMOVING_SUFFIX)
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        path = doomed
    shutil.rmtree(path)


def remove_leftovers(directory: Path) -> list[str]:
    """Remove what a killed process left: half-written and half-removed checkpoints. Only under the run's lock."""
    removed = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.is_dir() and path.name.endswith((PARTIAL_SUFFIX, REMOVING_SUFFIX)):
            remove_folder(path)
            removed.append(path.name)
        elif path.name.startswith(LATEST_NAME + PARTIAL_MARK):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def to_rotate(steps: list[int], newest: int, keep_last: int, keep_every: int | None, damaged: set[int]) -> list[int]:
    """Steps whose checkpoints go, once that of step `newest` is complete.

    Intact checkpoints count, newest first; one known to be damaged never takes the place of an intact one, and goes
    when it is older than all that stay. Those of later steps (of a course that was left) are not touched.

    Args:
        steps: of all checkpoints.
        newest: step just saved.
        keep_last: intact ones to keep, `newest` included.
        keep_every: multiples of this stay.
        damaged: steps known to be damaged.
    """
    intact = sorted((step for step in steps if step <= newest and step not in damaged), reverse=True)
    kept = intact[: max(1, keep_last)]
    oldest_kept = kept[-1] if kept else newest
    doomed = [step for step in intact if step < oldest_kept and not (keep_every and step % keep_every == 0)]
    return sorted(doomed + [step for step in damaged if step in steps and step < oldest_kept])


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
        # Opening the folder above makes NFS ask its server again.
        with suppress(OSError), os.scandir(path.parent):
            pass


def holds(path: Path, text: str) -> bool:
    """Whether a file can be read and has the text in it."""
    try:
        return text in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


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


def find_verified(path: Path, check: Callable[[Path], Manifest] = verify) -> tuple[Path, Manifest]:
    """Find a checkpoint's folder, or the newest one of a run, that `check` has compared with its manifest.

    Raises:
        CheckpointError: there is none, or none that is intact.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a run or a checkpoint (RUN/checkpoints/step-…)")
    if not (path / CHECKPOINTS_DIR).is_dir():
        return path, check(path)
    newest = find_newest_intact(path / CHECKPOINTS_DIR, check).newest
    if newest is None:
        raise CheckpointError(f"{path / CHECKPOINTS_DIR} holds no checkpoint yet; wait for the run's first one")
    return newest, read_manifest(newest)

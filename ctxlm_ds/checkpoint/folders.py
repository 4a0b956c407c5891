"""The folders under RUN/checkpoints: names, search for an intact one, rotation, and free space."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ctxlm_ds.atomic import FULL_DISK_ERRORS, PARTIAL_MARK
from ctxlm_ds.checkpoint.manifest import Manifest, read_manifest, verify
from ctxlm_ds.console import format_duration, logger
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.untrusted_json import read_text

CHECKPOINTS_DIR = "checkpoints"
LATEST_NAME = "latest"
AVERAGE_NAME = "average.json"
"""In an average of checkpoints: what it is made of, and the progress of the newest."""
PARTIAL_SUFFIX = ".partial"
REMOVING_SUFFIX = ".removing"
_STEP_NAME = re.compile(r"step-(\d{8,})")
WAIT_S = 60.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 2.0
_REMEDIES = {
    **dict.fromkeys(FULL_DISK_ERRORS, "free space there or raise the quota"),
    errno.EROFS: "it is mounted read-only; mount it for writing",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user the right to write there"),
    errno.ESTALE: "the file server no longer knows the folder; mount it again on that node",
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
    """Return the folders with a checkpoint's name by step, in ascending order, intact or not."""
    paths = directory.iterdir() if directory.is_dir() else ()
    found = {step_of(path): path for path in paths if _STEP_NAME.fullmatch(path.name) and path.is_dir()}
    return dict(sorted(found.items()))


def find_newest_intact(
    directory: Path,
    check: Callable[[Path], Manifest] = verify,
    present: Mapping[int, Path] | None = None,
    speaks: bool = True,
) -> tuple[Path | None, tuple[Path, ...]]:
    """Verify checkpoints, newest first, until one is intact; return it (None without any) and the damaged after it.

    `latest` does not count: after a crash it may name an older checkpoint. `check` verifies one folder; `present` are
    the folders by step (None: list the directory); without `speaks` nothing is logged. Raises CheckpointError if there
    are checkpoints and all are damaged.
    """
    folders = list_checkpoints(directory) if present is None else present
    damaged: dict[Path, str] = {}
    for step, folder in sorted(folders.items(), reverse=True):
        started_s = time.monotonic()
        try:
            manifest = check(folder)
            if manifest.step != step:
                raise CheckpointError(f"{folder} is damaged: its manifest is that of step {manifest.step}")
        except CheckpointError as error:
            if speaks:
                logger.warning("%s; it will not be used", error)
            damaged[folder] = str(error)
            continue
        if speaks:
            megabytes = sum(entry.bytes for entry in manifest.files.values()) / 1e6
            took = format_duration(time.monotonic() - started_s)
            logger.info("verified %s (%.1f MB in %s)", folder, megabytes, took)
        return folder, tuple(damaged)
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {directory} is intact: {'; '.join(damaged.values())}. Restore one from a copy; a run "
            f"must not start over unasked, so move {directory} away to start it from the beginning"
        )
    return None, ()


def remove_folder(path: Path) -> None:
    """Remove a checkpoint; a process that is killed leaves no half of it under a checkpoint's name."""
    if path.is_symlink():
        path.unlink()
        return
    if not path.name.endswith((REMOVING_SUFFIX, PARTIAL_SUFFIX)):
        doomed = path.with_name(path.name + REMOVING_SUFFIX)
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        path = doomed
    shutil.rmtree(path)


def remove_leftovers(directory: Path) -> None:
    """Remove half-written and half-removed checkpoints of a killed process; only under the run's lock."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        is_unfinished = path.name.endswith((PARTIAL_SUFFIX, REMOVING_SUFFIX))
        if is_unfinished and path.is_dir():
            remove_folder(path)
        elif is_unfinished or path.name.startswith(LATEST_NAME + PARTIAL_MARK):
            path.unlink(missing_ok=True)
        else:
            continue
        logger.info("removed the unfinished %s", path)


def to_rotate(steps: list[int], newest: int, keep_last: int, keep_every: int | None, damaged: set[int]) -> list[int]:
    """Return the steps whose checkpoints are removed once that of step `newest` is complete.

    Only intact checkpoints count towards `keep_last`, `newest` included; a damaged one is removed when it is older than
    all that are kept. Multiples of `keep_every` are kept. Checkpoints of later steps are not touched.
    """
    intact = sorted((step for step in steps if step <= newest and step not in damaged), reverse=True)
    kept = intact[: max(1, keep_last)]
    oldest_kept = kept[-1] if kept else newest
    doomed = [step for step in intact if step < oldest_kept and not (keep_every and step % keep_every == 0)]
    return sorted(doomed + [step for step in damaged if step in steps and step < oldest_kept])


def wait_until(is_there: Callable[[], bool], path: Path, what: str) -> None:
    """Wait until `is_there()`. Raises CheckpointError after a minute; `what` describes it ("was made by rank 0")."""
    deadline_s = time.monotonic() + WAIT_S
    pause_s = FIRST_LOOK_S
    while not is_there():
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"{path} {what} and is not visible on {socket.gethostname()}: the run directory must be on storage "
                "that all nodes share"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        # Listing the parent folder makes NFS ask its server again.
        with suppress(OSError), os.scandir(path.parent):
            pass


def holds(path: Path, text: str) -> bool:
    """Return whether a file can be read and contains the text."""
    try:
        return text in read_text(path)
    except ValueError:
        return False


def explain(error: Exception) -> str:
    """Return an error as one line: what, which file, which host, and a remedy if one is known."""
    if not isinstance(error, OSError):
        return str(error)
    where = f" ({error.filename})" if error.filename else ""
    text = f"{error.strerror or error}{where} on {socket.gethostname()}"
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{text}; {remedy}" if remedy else text


def find_verified(path: Path, check: Callable[[Path], Manifest] = verify) -> tuple[Path, Manifest]:
    """Return a checkpoint, or the newest intact one of a run, after `check`. Raises CheckpointError without one."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a run or a checkpoint (RUN/checkpoints/step-…)")
    if not (path / CHECKPOINTS_DIR).is_dir():
        return path, check(path)
    newest = find_newest_intact(path / CHECKPOINTS_DIR, check)[0]
    if newest is None:
        raise CheckpointError(f"{path / CHECKPOINTS_DIR} holds no checkpoint yet; wait for the run's first one")
    return newest, read_manifest(newest)


def check_output(output: Path, source: Path, is_earlier_result: bool = False) -> None:
    """Raise CheckpointError unless `output` is free or an earlier result, and does not contain the source."""
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    if not is_free and not is_earlier_result:
        raise CheckpointError(f"{output} exists and would be overwritten; give another --output")
    if source.resolve().is_relative_to(output.resolve()):
        raise CheckpointError(f"{output} contains the source {source}, which it would replace; give another --output")

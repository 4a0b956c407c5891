"""Names and states of the folders under RUN/checkpoints: complete, half-written, on the way out."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ctxlm_ds.atomic import PARTIAL_MARK
from ctxlm_ds.checkpoint.manifest import Manifest, verify
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import CheckpointError

logger = logging.getLogger("ctxlm_ds")

CHECKPOINTS_DIR = "checkpoints"
LATEST_NAME = "latest"
PARTIAL_SUFFIX = ".partial"
REMOVING_SUFFIX = ".removing"
_STEP_NAME = re.compile(r"step-(\d{8,})")


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
class Search:
    """Result of looking for a checkpoint to continue from."""

    newest: Path | None
    """Newest checkpoint that verifies; None where there is no checkpoint at all."""
    damaged: tuple[Path, ...]
    """Newer ones that do not verify."""


def find_newest_intact(directory: Path, check: Callable[[Path], Manifest] = verify) -> Search:
    """Verify from the newest checkpoint down until one is intact, warning about each damaged one.

    `latest` is a hint only: a crash between the last rename and its move leaves it behind. `check` verifies one folder.

    Raises:
        CheckpointError: there are checkpoints and all of them are damaged.
    """
    folders = list_checkpoints(directory)
    if not folders:
        return Search(None, ())
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
        return Search(folders[step], tuple(damaged))
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

"""Lock the folder of an unfinished dataset, and save and load how far it has come.

PREFIX.partial/ holds what is written, progress.json and a lock. Progress of another build is deleted, and damaged
progress too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.data.dataset.writer import WriterState
from ctxlm_ds.data.sources.types import Position
from ctxlm_ds.errors import DataError, RunLockedError
from ctxlm_ds.process.run_lock import RunLock

logger = logging.getLogger("ctxlm_ds")

FOLDER_SUFFIX = ".partial"
PROGRESS_NAME = "progress.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """State that an interrupted run resumes from."""

    build_key: str
    position: Position
    writers: list[WriterState]
    counts: dict[str, int]
    bad_records: dict[str, Any] = field(default_factory=dict)
    is_prepared: bool = False
    """True if every file is complete and only has to get its name."""


class PartialFolder:
    """Folder of an unfinished dataset, locked while the block lasts; one that another process left is taken over.

    Args:
        prefix: prefix of the dataset.
        build_key: what the dataset is made of; progress of another one is not continued.
        suffix: added to `prefix` for the name of the folder.
    """

    def __init__(self, prefix: str, build_key: str = "", suffix: str = FOLDER_SUFFIX) -> None:
        self.path = Path(f"{prefix}{suffix}")
        self.build_key = build_key
        self._lock = RunLock(self.path, remedy="choose another --output-prefix")

    @property
    def is_kept(self) -> bool:
        """True if some progress is on the disk."""
        return (self.path / PROGRESS_NAME).exists()

    def __enter__(self) -> PartialFolder:
        """Lock the folder. Raises DataError if another process works in it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except RunLockedError as error:
            raise DataError(str(error)) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the folder, unless it holds progress that an interrupted run resumes from."""
        with suppress(RunLockedError):  # another process took the lock over and works in the folder now
            self._lock.check()
            if kind is None or not self.is_kept:
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def check(self) -> None:
        """Raise RunLockedError if another process took the folder over (this one had been suspended)."""
        self._lock.check()

    def load(self) -> Progress | None:
        """Return the progress to resume from; None, and an empty folder, if there is none of this build."""
        progress = self._read()
        if progress is not None and progress.build_key == self.build_key:
            return progress
        if progress is not None:
            logger.warning("%s: holds progress of another input, tokenizer or setting; starting again", self.path)
        self.clear()
        return None

    def clear(self) -> bool:
        """Delete the progress and all unfinished files. Returns True if there were any."""
        left = [*self.path.glob(PROGRESS_NAME), *self.path.glob("*.part")]
        for path in left:
            path.unlink()
        return bool(left)

    def save(self, progress: Progress) -> None:
        """Replace the progress; what it counts must be on the disk. Raises RunLockedError like `check`."""
        self.check()
        value = asdict(progress)
        write_text(self.path / PROGRESS_NAME, json.dumps(value | {"sha256": _digest(value)}))

    def _read(self) -> Progress | None:
        path = self.path / PROGRESS_NAME
        try:
            value = json.loads(path.read_bytes())
            if value.pop("sha256") != _digest(value):
                raise DataError("changed since it was written")
            states = [WriterState(**state) for state in value.pop("writers")]
            return Progress(**(value | {"position": Position(**value["position"]), "writers": states}))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, DataError) as error:
            logger.warning("%s: damaged (%s); starting again", path, error)
            return None


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

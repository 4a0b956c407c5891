"""Save and load how far an unfinished dataset has come.

PREFIX.partial/ holds what is written, progress.json and a lock. Progress of another build is deleted, and damaged
progress too.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, field
from typing import Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.data.dataset.locked_folder import LockedFolder
from ctxlm_ds.data.dataset.writer import WriterState
from ctxlm_ds.data.sources.types import Position
from ctxlm_ds.errors import DataError

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


class PartialFolder(LockedFolder):
    """Folder of an unfinished dataset, which stays after an error if it holds progress.

    `build_key` is what the dataset is made of; progress of another one is not continued.
    """

    unfinished = (PROGRESS_NAME, "*.part")

    def __init__(self, prefix: str, build_key: str) -> None:
        super().__init__(f"{prefix}{FOLDER_SUFFIX}")
        self.build_key = build_key

    @property
    def is_kept(self) -> bool:
        """True if some progress is on the disk."""
        return (self.path / PROGRESS_NAME).exists()

    def load(self) -> Progress | None:
        """Return the progress to resume from; None, and an empty folder, if there is none of this build."""
        progress = self._read()
        if progress is not None and progress.build_key == self.build_key:
            return progress
        if progress is not None:
            logger.warning("%s: holds progress of another input, tokenizer or setting; starting again", self.path)
        self.clear()
        return None

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

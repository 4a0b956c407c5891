"""The locked folder of the unfinished files of a dataset."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from ctxlm_ds.errors import DataError, RunLockedError
from ctxlm_ds.process.run_lock import RunLock


class LockedFolder:
    """Folder of unfinished files, locked while the block lasts; one that another process left is taken over."""

    unfinished: tuple[str, ...] = ("*.part",)
    """Patterns of the files to delete."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock = RunLock(self.path, remedy="choose another --output-prefix")

    def __enter__(self) -> LockedFolder:
        """Lock the folder. Raises DataError if another process works in it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except RunLockedError as error:
            raise DataError(str(error)) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(RunLockedError):  # another process took the lock over and works in the folder now
            self._lock.check()
            if kind is None or not self.is_kept:
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    @property
    def is_kept(self) -> bool:
        """True if the folder stays after an error."""
        return False

    def check(self) -> None:
        """Raise RunLockedError if another process took the folder over (this one had been suspended)."""
        self._lock.check()

    def clear(self) -> bool:
        """Delete all unfinished files. Returns True if there were any."""
        left = [path for pattern in self.unfinished for path in self.path.glob(pattern)]
        for path in left:
            path.unlink()
        return bool(left)

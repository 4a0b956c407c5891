"""Copies of files on a node's own disk, proved by their checksums: what is there and verifies is not copied again.

In: a StagePlan. Out: copies below a folder, and what became of each item. Needs the standard library only.
Not here: what is to be copied (staging_plan.py), what a run then reads (staging.py).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import PARTIAL_MARK, fsync_path, partial_path, publish, write_text
from ctxlm_ds.data.dataset.checksums import file_digest
from ctxlm_ds.errors import DataError

ROOT_NAME = "ctxlm-staged"
STAMP_NAME = "staged.json"
BLOCK_BYTES = 1 << 24
COPIES_AT_ONCE = 4
ABANDONED_AFTER_S = 600.0
SPARE_BYTES = 1 << 28
"""Left free on the disk."""


@dataclass(frozen=True)
class StagedFile:
    """One file and the proof of its copy."""

    source: str
    target: str
    """Below the staging folder."""
    num_bytes: int
    mtime_ns: int
    """Of the source; with the size it tells whether a digest that a former copy has found is still the source's."""
    sha256: str | None
    """As recorded when the file was made; None where nothing records it."""


@dataclass(frozen=True)
class StageItem:
    """What is staged as a whole: a dataset with its sample indexes, or a tokenizer."""

    kind: str
    source: str
    """As the recipe names it."""
    target: str
    """The same below the staging folder."""
    files: list[StagedFile]
    missing_indexes: list[str]
    """Sample indexes that are not built yet."""

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True)
class StagePlan:
    """All items of a run, in the order of their worth, and the settings that name them."""

    items: list[StageItem]
    train: list[dict[str, Any]]
    """data.train."""
    validation: list[dict[str, Any]]
    """data.validation."""
    has_index_dir: bool
    """Whether data.sample_index_dir is set."""

    def to_json(self) -> str:
        """Text for from_json()."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StagePlan:
        """The plan that to_json() wrote."""
        values = json.loads(text)
        items = [
            StageItem(**{**item, "files": [StagedFile(**file) for file in item["files"]]}) for item in values["items"]
        ]
        return cls(**{**values, "items": items})


def folder_name(source: str) -> str:
    """A folder for a source, the same on every node, different for equal names in different places."""
    path = Path(source).resolve()
    return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def room(items: Sequence[StageItem], into: Path) -> dict[str, Any]:
    """Free bytes, and the bytes that each item still needs; a folder that cannot be made has no room and an error."""
    root = into / ROOT_NAME
    try:
        root.mkdir(parents=True, exist_ok=True)
        status = os.statvfs(root)
    except OSError as error:
        return {"free_bytes": 0, "needed_bytes": [], "error": f"{root}: {error.strerror or error}"}
    needed = [sum(file.num_bytes for file in item.files if not _has_size(file, root)) for item in items]
    free_bytes = max(0, status.f_bavail * status.f_frsize - SPARE_BYTES)
    return {"free_bytes": free_bytes, "needed_bytes": needed, "error": None}


def _has_size(file: StagedFile, root: Path) -> bool:
    try:
        return (root / file.target).stat().st_size == file.num_bytes
    except OSError:
        return False


def copy_items(items: Iterable[StageItem], into: Path) -> list[dict[str, Any]]:
    """Copy what is missing or does not verify; for each item the bytes copied and kept, or the error."""
    root = into / ROOT_NAME
    return [_copy_item(item, root) for item in items]


def _copy_item(item: StageItem, root: Path) -> dict[str, Any]:
    stamps = _Stamps(root / folder_of(item))
    try:
        with ThreadPoolExecutor(COPIES_AT_ONCE) as threads:
            copied = list(threads.map(lambda file: _stage_file(file, root, stamps), item.files))
    except (OSError, DataError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        return {"source": item.source, "error": reason}
    finally:
        with contextlib.suppress(OSError):
            stamps.write()
    moved = sum(file.num_bytes for file, is_new in zip(item.files, copied) if is_new)  # noqa: B905 - equally long
    return {"source": item.source, "copied_bytes": moved, "kept_bytes": item.num_bytes - moved, "error": None}


def folder_of(item: StageItem) -> str:
    """The folder of an item below the staging folder."""
    return item.target.split("/")[0]


class _Stamps:
    """Digests of sources that nothing else records, as former copies have found them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STAMP_NAME
        self._digests: dict[str, list[Any]] = {}
        with contextlib.suppress(OSError, ValueError):
            self._digests = json.loads(self._path.read_text(encoding="utf-8"))

    def expected(self, file: StagedFile) -> str | None:
        """The digest that a copy must have; None where it is not known."""
        if file.sha256 is not None:
            return file.sha256
        entry = self._digests.get(file.target)
        return str(entry[2]) if entry and entry[:2] == [file.num_bytes, file.mtime_ns] else None

    def keep(self, file: StagedFile, digest: str) -> None:
        self._digests[file.target] = [file.num_bytes, file.mtime_ns, digest]

    def write(self) -> None:
        if self._path.parent.is_dir():
            write_text(self._path, json.dumps(self._digests, indent=1) + "\n")


def _stage_file(file: StagedFile, root: Path, stamps: _Stamps) -> bool:
    """Make sure of one copy; whether it had to be copied.

    Raises:
        DataError: the source is not what its checksum says.
        OSError: no room, not readable.
    """
    target = root / file.target
    expected = stamps.expected(file)
    if expected is not None and _has_size(file, root) and file_digest(target) == expected:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    digest = _copy(Path(file.source), target)
    if file.sha256 is not None and digest != file.sha256:
        target.unlink(missing_ok=True)
        raise DataError(
            f"{file.source}: sha256 {digest[:16]}, {file.sha256[:16]} was recorded when it was made; the file is "
            "damaged, restore it or make it again"
        )
    stamps.keep(file, digest)
    return True


def _remove_leftovers(target: Path) -> None:
    """What killed tasks left of a copy; another job's task that is at work writes all the time."""
    for leftover in target.parent.glob(f"{glob.escape(target.name)}{PARTIAL_MARK}*"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > ABANDONED_AFTER_S:
                leftover.unlink()


def _copy(source: Path, target: Path) -> str:
    """Copy aside and rename; sha256 (hex) of what was read."""
    partial = partial_path(target)
    digest = hashlib.sha256()
    try:
        with open(source, "rb", buffering=0) as reader, open(partial, "wb", buffering=0) as writer:
            buffer = memoryview(bytearray(BLOCK_BYTES))
            while count := reader.readinto(buffer):
                digest.update(buffer[:count])
                _write_all(writer.fileno(), buffer[:count])
        fsync_path(partial)
        publish(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return digest.hexdigest()


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


def remove_staged(into: Path) -> None:
    """Remove everything that was staged below a folder."""
    shutil.rmtree(into / ROOT_NAME, ignore_errors=True)

"""manifest.json: the files of a complete checkpoint with sizes and checksums, which show damage, not origin."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import fsync_path, write_text
from ctxlm_ds.data.dataset.metadata import file_digest
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.untrusted_json import read_json

FORMAT = "ctxlm_ds-checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
HASH_THREADS = 8
MAX_STEP = 1 << 53


@dataclass(frozen=True)
class FileEntry:
    """Size and sha256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's step and its files by path relative to its folder."""

    step: int
    files: Mapping[str, FileEntry]


def hash_file(path: Path) -> FileEntry:
    """Return the size and sha256 of a file, which is read in blocks."""
    return FileEntry(path.stat().st_size, file_digest(path))


def hash_files(directory: Path, names: Sequence[str]) -> dict[str, FileEntry]:
    """Return the entries of several files of a folder, hashed in parallel threads."""
    with ThreadPoolExecutor(min(HASH_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return dict(zip(names, pool.map(lambda name: hash_file(directory / name), names), strict=True))


def list_files(directory: Path) -> list[str]:
    """Return the relative path of every file below a folder, except the manifest."""
    found = [Path(root, name).relative_to(directory) for root, _, names in os.walk(directory) for name in names]
    return sorted(str(path) for path in found if str(path) != MANIFEST_NAME)


def write_manifest(directory: Path, step: int, files: Mapping[str, FileEntry]) -> None:
    """Write manifest.json; the files it lists must be on the disk already."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "files": {name: asdict(files[name]) for name in sorted(files)},
    }
    write_text(directory / MANIFEST_NAME, json.dumps(document, indent=1) + "\n")


def seal(directory: Path, step: int, flushed: Mapping[str, FileEntry]) -> None:
    """Flush and hash the files that are not among `flushed`, then write the manifest of all."""
    own = [name for name in list_files(directory) if name not in flushed]
    for path in sorted({directory, *(directory / name for name in own), *((directory / name).parent for name in own)}):
        fsync_path(path)
    write_manifest(directory, step, {**flushed, **{name: hash_file(directory / name) for name in own}})


def read_manifest(directory: Path) -> Manifest:
    """Read manifest.json. Raises CheckpointError if it is missing, damaged, or of another format or version."""
    path = directory / MANIFEST_NAME
    if not path.exists():
        raise CheckpointError(f"{directory}: no {MANIFEST_NAME}, so this is not a complete checkpoint")
    document = read_json(path, CheckpointError)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a manifest of a {FORMAT}")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: format version {document.get('version')!r}, this program reads {VERSION}; use the release that "
            "wrote it"
        )
    try:
        return _parse(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {error})") from None


def _parse(document: dict[str, Any]) -> Manifest:
    files = {}
    for name, entry in document["files"].items():
        os.fsencode(name)  # Raises ValueError for a name that no file can have.
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
            raise ValueError(f"file name {name!r} leaves the checkpoint")
        files[name] = FileEntry(int(entry["bytes"]), str(entry["sha256"]))
    step = document["step"]
    if type(step) is not int or not 0 <= step < MAX_STEP:
        raise ValueError(f"step {step!r}")
    return Manifest(step, files)


def share_of(files: Mapping[str, FileEntry], part: int, parts: int) -> list[str]:
    """Return the files of one of several parts of about equal size; the same division on every rank."""
    largest_first = sorted(files, key=lambda name: (-files[name].bytes, name))
    return sorted(largest_first[part::parts])


def verify(directory: Path, quick: bool = False, sizes_only: str | None = None) -> Manifest:
    """Check every byte of a checkpoint against its manifest, or sizes only: `quick`, or of files like `sizes_only`.

    Raises CheckpointError, which names each file that is missing, differs, or is not a regular file.
    """
    manifest = read_manifest(directory)
    problems = []
    for name in dict.fromkeys((*manifest.files, *list_files(directory))):
        entry = manifest.files.get(name)
        try:
            found = os.stat(directory / name)
        except OSError as error:
            problems.append(f"{name}: {'missing' if isinstance(error, FileNotFoundError) else error.strerror}")
            continue
        if not stat.S_ISREG(found.st_mode):
            problems.append(f"{name}: not a regular file")
        elif entry is not None and found.st_size != entry.bytes:
            problems.append(f"{name}: {found.st_size} bytes, the manifest says {entry.bytes}")
    if not quick and not problems:
        names = [name for name in manifest.files if sizes_only is None or not Path(name).match(sizes_only)]
        problems = find_changed(directory, manifest, names)
    refuse_damage(directory, problems)
    return manifest


def refuse_damage(directory: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError if there are problems."""
    if problems:
        raise CheckpointError(f"{directory} is damaged: " + "; ".join(problems))


def find_changed(directory: Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """Return what is wrong with the contents of files, each read to its end."""
    try:
        found = hash_files(directory, names)
    except OSError as error:
        return [f"{os.path.relpath(error.filename or directory, directory)}: cannot be read ({error.strerror})"]
    return [
        f"{name}: sha256 {found[name].sha256[:12]}…, the manifest says {manifest.files[name].sha256[:12]}…"
        for name in names
        if found[name] != manifest.files[name]
    ]

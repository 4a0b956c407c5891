"""Files of a sample index: .npy arrays written in pieces, memory-mapped for reading, in a folder that appears whole.

Two processes may build the same folder at once: each writes aside, the first to finish renames, the other throws its
own away. A folder left by a process that was killed is removed by the next build of the same index on that host.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ctxlm_ds.atomic import fsync_path, fsync_tree
from ctxlm_ds.errors import DataError

META_NAME = "meta.json"
BUILDING_MARK = ".building-"


class NpyAppender:
    """A one-dimensional .npy file that grows: the header, which has room for any length, is corrected at the end."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.count = 0
        self._handle = open(path, "wb")  # noqa: SIM115 - open for as long as the object
        self._write_header()

    def append(self, values: NDArray[Any]) -> None:
        self._handle.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.count += len(values)

    def _write_header(self) -> None:
        description = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": description, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._handle, header)

    def __enter__(self) -> NpyAppender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.seek(0)
        self._write_header()
        self._handle.close()


def open_array(directory: Path, name: str) -> NDArray[Any]:
    """A memory-mapped array (plain ndarray view: slicing a memmap object costs several times more).

    Raises:
        DataError: the file is no .npy array of the size that its header says.
    """
    path = directory / f"{name}.npy"
    try:
        return np.asarray(np.load(path, mmap_mode="r"))
    except (OSError, ValueError) as error:
        if path.exists() and path.stat().st_size > 0 and _is_empty_array(path):
            return np.load(path)
        raise DataError(f"{path}: not readable ({error}); delete the folder and build the samples again") from error


def _is_empty_array(path: Path) -> bool:
    """Whether a .npy file holds an array without elements, which cannot be mapped."""
    try:
        return np.load(path).size == 0
    except (OSError, ValueError):
        return False


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Fill a folder aside; on success it gets its final name, unless another process was faster."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final)
    partial = final.with_name(f"{final.name}{BUILDING_MARK}{socket.gethostname()}-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        fsync_tree(partial)
        try:
            os.rename(partial, final)
        except OSError:
            if not (final / META_NAME).exists():
                raise
        fsync_path(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(final: Path) -> None:
    """Remove what builds of `final` by processes of this host that no longer run have left."""
    mark = f"{final.name}{BUILDING_MARK}{socket.gethostname()}-"
    for entry in final.parent.iterdir():
        process = entry.name.removeprefix(mark)
        if process == entry.name or not process.isdigit():
            continue
        if int(process) == os.getpid() or not _is_running(int(process)):
            shutil.rmtree(entry, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with the size of every other file of the folder."""
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    (directory / META_NAME).write_text(json.dumps(meta | {"files": sizes}, indent=1) + "\n", encoding="utf-8")


def read_meta(directory: Path) -> dict[str, Any]:
    """Read meta.json and check that every file is there in its full size.

    Raises:
        DataError: something is missing or of another size.
    """
    remedy = "delete the folder and build the samples again (tools/build_samples.py)"
    try:
        meta: dict[str, Any] = json.loads((directory / META_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{directory}: no readable {META_NAME} ({error}); {remedy}") from error
    for name, expected in meta["files"].items():
        path = directory / name
        size = path.stat().st_size if path.exists() else None
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes instead of {expected}"
            raise DataError(f"{path}: {found}; {remedy}")
    return meta

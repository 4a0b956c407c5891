"""Real disks that are small, turn read-only or hang, for tests; they need root and are skipped without it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _run(*words: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(word) for word in words], capture_output=True, check=False)


def _mount(*words: object) -> None:
    if os.geteuid() != 0 or _run("mount", "-n", *words).returncode != 0:
        pytest.skip("mounting a file system needs root")


def _unmount(folder: Path) -> None:
    done = _run("umount", "-n", folder)
    if done.returncode != 0:
        _run("umount", "-n", "-l", folder)


class Disk:
    """A mounted file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Take all room that is left."""
        with open(self._filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 65536)
            except OSError:
                return

    def empty(self) -> None:
        """Give the room back."""
        self._filler.unlink()

    def remount(self, how: str) -> bool:
        """`ro` or `rw`; False where a file is open for writing."""
        return _run("mount", "-n", "-o", f"remount,{how}", self.folder).returncode == 0

    def freeze(self) -> None:
        """Whoever writes hangs, as on a file server that does not answer; reading works."""
        assert _run("fsfreeze", "--freeze", self.folder).returncode == 0

    def thaw(self) -> None:
        _run("fsfreeze", "--unfreeze", self.folder)


@contextmanager
def memory_disk(folder: Path, size: str) -> Iterator[Disk]:
    """A tmpfs."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    try:
        yield Disk(folder)
    finally:
        _unmount(folder)


@contextmanager
def freezable_disk(folder: Path, image: Path, size_bytes: int = 64 << 20) -> Iterator[Disk]:
    """An ext4 in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    if _run("mkfs.ext4", "-q", "-F", image).returncode != 0:
        pytest.skip("mkfs.ext4 is not installed (apt-get install e2fsprogs)")
    _mount("-o", "loop", image, folder)
    disk = Disk(folder)
    try:
        yield disk
    finally:
        disk.thaw()
        _unmount(folder)

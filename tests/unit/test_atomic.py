"""Files and folders are complete or missing, and an output tells what it was made of."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds import atomic
from ctxlm_ds.errors import DataError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_text_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "a.txt"
    atomic.write_text(path, "one, naïve")
    atomic.write_text(path, "two")
    assert path.read_text() == "two"

    def fail(partial: Path, final: Path) -> None:
        assert partial.read_text() == "three"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic, "publish", fail)
    with pytest.raises(OSError):
        atomic.write_text(path, "three")
    assert path.read_text() == "two" and names(path.parent) == ["a.txt"]


def test_a_folder_is_there_once_it_is_complete(tmp_path: Path) -> None:
    final = tmp_path / "out"
    with atomic.output_folder(final) as folder:
        (folder / "a").write_text("1")
        assert not final.exists()
    with pytest.raises(KeyError), atomic.output_folder(final) as folder:
        (folder / "a").write_text("2")
        raise KeyError
    assert (final / "a").read_text() == "1" and names(tmp_path) == ["out"]
    with atomic.output_folder(final) as folder:
        (folder / "b").write_text("3")
    assert names(final) == ["b"] and names(tmp_path) == ["out"]


@pytest.mark.parametrize("make", [lambda path: (path / "x").mkdir(parents=True), lambda path: path.write_text("x")])
def test_of_several_writers_the_first_wins(tmp_path: Path, make: Callable[[Path], object]) -> None:
    final = tmp_path / "out"
    with pytest.raises(FileExistsError, match="exists already"), atomic.output_folder(final, replace=False):
        make(final)
    assert names(tmp_path) == ["out"]


def test_leftovers_are_told_and_only_those_of_this_output(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = atomic.partial_path(tmp_path / "out[1]")
    left.mkdir()
    atomic.partial_path(tmp_path / "out1").mkdir()
    with caplog.at_level(logging.WARNING, logger="ctxlm_ds"), atomic.output_folder(tmp_path / "out[1]"):
        pass
    assert caplog.messages == [f"{left} is left from an interrupted run; remove it if none is running"]
    assert atomic.partial_path(tmp_path / "out[1]") != left


def test_sigterm_ends_the_block_like_ctrl_c(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), atomic.output_folder(tmp_path / "out"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before and not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with atomic.output_folder(tmp_path / "out"):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize(("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_a_full_disk_is_told_from_a_broken_one(number: int, full: bool) -> None:
    assert atomic.is_full_disk(OSError(number, "x")) is full
    assert not atomic.is_full_disk(ValueError(number))


MADE = {"input": ["a"], "lowercase": True, "digest": "0123456789" * 5}


def test_an_output_of_the_same_inputs_is_recognised() -> None:
    # A tuple is a list in JSON.
    assert atomic.is_same("out", MADE, {**MADE, "input": ("a",)}, "remove it", DataError)


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (None, "out already exists without a record of how it was made; remove it"),
        ({**MADE, "lowercase": False}, "out already exists and was made differently: lowercase false -> true; remove"),
        ({**MADE, "digest": "9" * 50}, r"digest 999999999999\.\.\. -> 012345678901\.\.\.; remove it"),
        ({**MADE, "older": "x"}, "older x -> null; remove it"),
    ],
)
def test_an_output_of_other_inputs_is_refused(recorded: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        atomic.is_same("out", recorded, MADE, "remove it", DataError)

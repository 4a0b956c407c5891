"""Files of a wrong kind, size, encoding or depth are one error that names the file, without waiting for a writer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ctxlm_ds.atomic import read_object
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.untrusted_json import MAX_DEPTH, open_regular, read_json, read_json_object, read_text


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "missing"),
        (fifo, "not a regular file"),
        (lambda p: p.symlink_to("/dev/zero"), "not a regular file"),
        (lambda p: p.mkdir(), "not a regular file"),
        (lambda p: p.write_bytes(b"\xff\xfe{}"), "UTF-8"),
        (lambda p: p.write_text("{"), "cannot be read as JSON"),
        (lambda p: p.write_text(nested(100_000)), "cannot be read as JSON"),
        (lambda p: p.write_text(f'{{"a": {nested(MAX_DEPTH)}}}'), "levels"),
        (lambda p: p.write_text("9" * 10_000), "cannot be read as JSON"),
        (lambda p: p.write_text("[1]"), "holds a JSON list, expected an object"),
        (lambda p: p.write_text(" " * 2000 + "{}"), "more than 1,000 bytes"),
    ],
)
def test_refused_with_the_path(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "file.json"
    make(path)
    limit = 1000 if "bytes" in message else 1 << 20
    with pytest.raises(CheckpointError, match=message) as error:
        read_json_object(path, CheckpointError, limit)
    assert str(error.value).startswith(f"{path}: ")
    if "bytes" not in message:
        assert read_object(path) is None


def test_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"a": [1, "é"]}', encoding="utf-8")
    assert read_json_object(path) == read_json(path) == read_object(path) == {"a": [1, "é"]}
    (tmp_path / "link").symlink_to(path)
    assert read_text(tmp_path / "link") == path.read_text(encoding="utf-8")
    with open_regular(path) as file:
        assert file.read(1) == b"{"
    path.write_text(nested(MAX_DEPTH))
    assert read_json(path)

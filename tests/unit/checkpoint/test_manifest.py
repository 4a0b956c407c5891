"""The manifest finds every kind of damage and says which."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ctxlm_ds.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    hash_file,
    hash_files,
    list_files,
    read_manifest,
    share_of,
    verify,
    write_manifest,
)
from ctxlm_ds.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    (tmp_path / "weights-00000.safetensors").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "empty").write_bytes(b"")
    write_manifest(tmp_path, 7, hash_files(tmp_path, list_files(tmp_path)))
    return tmp_path


def test_hash_agrees_with_hashlib_beyond_one_chunk(tmp_path: Path) -> None:
    data = b"0123456789" * 500_003
    (tmp_path / "f").write_bytes(data)
    entry = hash_file(tmp_path / "f")
    assert (entry.bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_intact(folder: Path) -> None:
    manifest = verify(folder)
    assert manifest.step == 7
    assert sorted(manifest.files) == ["empty", "tokenizer/vocab.txt", "weights-00000.safetensors"]
    assert sum(entry.bytes for entry in manifest.files.values()) == 4 + 256 * 40
    assert verify(folder, quick=True) == manifest


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message", "seen_by_size"),
    [
        (lambda f: _flip(f / "weights-00000.safetensors"), r"weights-00000.safetensors: sha256 \w+…, the manif", False),
        (lambda f: (f / "weights-00000.safetensors").write_bytes(b"xy"), "weights-00000.*: 2 bytes, .* 10240", True),
        (lambda f: (f / "tokenizer" / "vocab.txt").unlink(), "tokenizer/vocab.txt: missing", True),
        (lambda f: (f / "empty").write_bytes(b"1"), "empty: 1 bytes, the manifest says 0", True),
        (lambda f: (f / MANIFEST_NAME).unlink(), "no manifest.json", True),
        (lambda f: (f / MANIFEST_NAME).write_text("{"), "cannot be read as JSON", True),
        (lambda f: (f / MANIFEST_NAME).write_bytes(b"\xff\xfe{}"), "cannot be read as UTF-8", True),
        (lambda f: (f / MANIFEST_NAME).write_text("[]"), "not a manifest", True),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], object], message: str, seen_by_size: bool) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        verify(folder)
    if seen_by_size:
        with pytest.raises(CheckpointError, match=message):
            verify(folder, quick=True)
    else:
        verify(folder, quick=True)


def test_every_damaged_file_is_named_at_once(folder: Path) -> None:
    (folder / "empty").unlink()
    (folder / "tokenizer" / "vocab.txt").write_text("other")
    with pytest.raises(CheckpointError, match="empty: missing; tokenizer/vocab.txt: 5 bytes"):
        verify(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format version 2, this program reads 1"),
        ({"format": "other"}, "not a manifest"),
        ({"files": {"../outside": {"bytes": 1, "sha256": "0"}}}, "leaves the checkpoint"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": "0"}}}, "leaves the checkpoint"),
        ({"files": {"a": {"bytes": 1}}}, "damaged .*sha256"),
        ({"files": None}, "damaged"),
    ],
)
def test_a_wrong_manifest_is_refused(folder: Path, change: dict[str, object], message: str) -> None:
    document = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps({**document, **change}))
    with pytest.raises(CheckpointError, match=message):
        read_manifest(folder)


def test_every_flipped_byte_of_the_manifest_is_harmless_or_found(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    original = path.read_bytes()
    expected = verify(folder)
    for position in range(len(original)):
        data = bytearray(original)
        data[position] ^= 0x04
        path.write_bytes(data)
        try:
            found = verify(folder)
        except CheckpointError:
            continue
        # The step is compared with the folder's name by the search; whitespace may change.
        assert found.files == expected.files


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_parts_divide_the_files_by_their_bytes(parts: int) -> None:
    files = {f"f{number:02d}": FileEntry(1 + number * number % 97, "") for number in range(30)}
    shares = [share_of(files, part, parts) for part in range(parts)]
    assert sorted(name for share in shares for name in share) == list(files)
    assert all(share == sorted(share) for share in shares)
    loads = [sum(files[name].bytes for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(entry.bytes for entry in files.values())

"""The files of a sample index: plain .npy files, damage, checksums, another folder's name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.index import storage
from ctxlm_ds.data.index.build import IndexPlace
from ctxlm_ds.data.index.storage import NpyAppender, open_array
from ctxlm_ds.errors import DataError
from tests.sample_data import build_sample_index, random_documents, write_dataset
from tests.unit.data.index.test_index import BERT, config_of


def test_damage_is_named(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(5))
    config = config_of("full_sentences")
    directory = build_sample_index(prefix, BERT, config).directory
    samples = directory / "samples.npy"
    whole = samples.read_bytes()
    samples.write_bytes(whole[:-5])
    with pytest.raises(DataError, match=rf"samples\.npy: has {len(whole) - 5} bytes instead of {len(whole)}"):
        IndexPlace.of(prefix, BERT, config.row_settings).open(BERT)
    samples.unlink()
    with pytest.raises(DataError, match="is missing"):
        IndexPlace.of(prefix, BERT, config.row_settings).open(BERT)
    (directory / "meta.json").write_text("{")
    with pytest.raises(DataError, match=r"meta\.json"):
        IndexPlace.of(prefix, BERT, config.row_settings).open(BERT)
    samples.write_bytes(b"not an array" * 10)
    with pytest.raises(DataError, match="not readable"):
        open_array(directory, "samples")


def test_checksums_are_those_of_sha256sum_and_a_changed_bit_is_noticed(tmp_path: Path) -> None:
    prefix, config = write_dataset(tmp_path / "d", random_documents(5)), config_of("full_sentences")
    index = build_sample_index(prefix, BERT, config)
    listed = "".join(f"{entry['sha256']}  {name}\n" for name, entry in index.meta["files"].items())
    subprocess.run(["sha256sum", "-c", "--strict", "-"], input=listed, text=True, check=True, cwd=index.directory)
    samples = index.directory / "samples.npy"
    content = bytearray(samples.read_bytes())
    content[-10] ^= 1
    samples.write_bytes(content)
    build_sample_index(prefix, BERT, config, verify="none")
    with pytest.raises(DataError, match=r"samples\.npy: sha256 .*meta\.json records .*delete the folder"):
        build_sample_index(prefix, BERT, config)


def test_files_are_read_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, config = write_dataset(tmp_path / "d", random_documents(5)), config_of("full_sentences")
    directory = build_sample_index(prefix, BERT, config).directory
    read: list[str] = []
    digest = storage.file_digest
    monkeypatch.setattr(storage, "file_digest", lambda path: (read.append(path.name), digest(path))[1])

    def files_read() -> list[str]:
        read.clear()
        build_sample_index(prefix, BERT, config, verify="changed")
        return read

    assert files_read() == files_read() == ["samples.npy"], "a file this young may change again within a tick"
    monkeypatch.setattr(storage, "SETTLED_NS", -(10**12))
    assert files_read() == ["samples.npy"] and files_read() == []
    read.clear()
    written_ns = (directory / "verified.json").stat().st_mtime_ns
    build_sample_index(prefix, BERT, config)
    assert read == ["samples.npy"], "only the start of a job leaves files out"
    assert (directory / "verified.json").stat().st_mtime_ns == written_ns, "nothing new is known"
    (directory / "verified.json").write_text("[" * 100_000)
    assert files_read() == ["samples.npy"] and files_read() == []

    samples = directory / "samples.npy"
    content, state = samples.read_bytes(), samples.stat()
    copy = directory.parent / "copy.npy"
    copy.write_bytes(content)
    copy.replace(samples)
    assert files_read() == ["samples.npy"] and files_read() == [], "another inode"
    samples.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(samples, ns=(state.st_atime_ns, state.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(DataError, match=r"samples\.npy: sha256 .*meta\.json records"):
            build_sample_index(prefix, BERT, config, verify="changed")


def test_a_folder_that_cannot_be_written_to_is_read_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, config = write_dataset(tmp_path / "d", random_documents(5)), config_of("full_sentences")
    index = build_sample_index(prefix, BERT, config)

    def refused(path: Path, text: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(storage, "SETTLED_NS", -(10**12))
    monkeypatch.setattr(storage, "write_text", refused)
    storage.verify_files(index.directory, index.meta, trust=True)
    assert not (index.directory / "verified.json").exists()


def test_a_renamed_index_is_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(5))
    short, long = config_of("full_sentences", 32), config_of("full_sentences", 64)
    one, other = (build_sample_index(prefix, BERT, config).directory for config in (short, long))
    shutil.rmtree(one)
    other.rename(one)
    with pytest.raises(DataError, match=r"meta\.json: this is the index with the key .*renamed"):
        build_sample_index(prefix, BERT, short)
    meta = json.loads((one / "meta.json").read_text())
    (one / "meta.json").write_text(json.dumps(meta | {"files": {"samples.npy": 5}}))
    with pytest.raises(DataError, match="not the description of a sample index"):
        IndexPlace.of(prefix, BERT, short.row_settings).open(BERT)


def test_growing_arrays_are_plain_npy_files(tmp_path: Path) -> None:
    path = tmp_path / "values.npy"
    with NpyAppender(path, np.int32) as file:
        for begin in range(0, 100_000, 1000):
            file.append(np.arange(begin, begin + 1000))
    assert np.array_equal(np.load(path), np.arange(100_000, dtype=np.int32))
    with NpyAppender(tmp_path / "empty.npy", np.int64):
        pass
    assert open_array(tmp_path, "empty").shape == (0,)

"""The writer: what it cannot store, what it leaves when it is killed or abandoned."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.data.dataset import writer as writer_module
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from tests.sample_data import DatasetWriter
from tests.unit.data.dataset.test_reader import documents_of, expect_refusal, read_documents, write_documents


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_documents(tmp_path / "data", documents_of(1, 1000), vocab_size=1000)
    return tmp_path / "data"


def test_writer_refuses_what_it_cannot_store(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", "uint16") as writer:
        for ids in ([65_536], [-1]):
            writer.add_sequence(ids)
            with pytest.raises(DataError, match="an id outside 0 to 65535"):
                writer.end_document()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="cannot be stored as float32"):
        DatasetWriter(tmp_path / "data", "float32")


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_writer_killed_while_publishing_leaves_no_dataset(
    tmp_path: Path, steps: int, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if overwrite:
        write_documents(tmp_path / "data", documents_of(1, 1000))
    real = writer_module.publish
    done: list[Path] = []

    def publish_and_stop(partial: Path, final: Path) -> None:
        if len(done) == steps:
            raise SystemExit
        real(partial, final)
        done.append(final)

    monkeypatch.setattr(writer_module, "publish", publish_and_stop)
    writer = DatasetWriter(tmp_path / "data", "uint16", overwrite)
    writer.add_sequence([1, 2, 3])
    writer.end_document()
    with pytest.raises(SystemExit):
        writer.finalize({})
    expect_refusal(tmp_path / "data", "no such file")
    assert not (tmp_path / "data.idx").exists()  # without which Megatron opens nothing either


def test_writer_leaves_nothing_when_abandoned_and_replaces_only_when_told(prefix: Path) -> None:
    folder = prefix.parent
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError, match="exist.* already.*--overwrite"):
        DatasetWriter(prefix, "uint16")
    with pytest.raises(RuntimeError), DatasetWriter(prefix, "uint16", overwrite=True) as writer:
        writer.add_sequence([1])
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with DatasetWriter(prefix, "uint16", overwrite=True) as writer:
        writer.add_sequence([7, 8])
        writer.end_document()
        writer.finalize({})
    assert read_documents(IndexedDataset(prefix)) == [[[7, 8]]]


def test_a_name_that_is_not_utf_8_is_recorded(tmp_path: Path) -> None:
    """A shell passes names of files as they are on the disk."""
    with DatasetWriter(tmp_path / "data", "uint16") as writer:
        writer.add_sequence([1])
        writer.end_document()
        writer.finalize({"inputs": ["caf\udce9.txt"]})
    assert (IndexedDataset(tmp_path / "data").metadata or {})["inputs"] == ["caf?.txt"]


def test_lengths_that_were_damaged_on_the_way_are_not_sealed(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", "uint16") as writer:
        writer.add_sequence([1, 2, 3])
        writer.end_document()
        writer.save()
        (path,) = tmp_path.glob("*/data.lengths.part")
        with open(path, "rb+") as file:
            file.write(b"\2")
        with pytest.raises(DataError, match="lengths of 2 tokens for 3 tokens"):
            writer.finalize({})
    assert list(tmp_path.iterdir()) == []

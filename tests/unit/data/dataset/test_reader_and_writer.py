"""The indexed dataset against megatron-core's own builder and reader, and files that must be refused."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.dataset import writer as writer_module
from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.dataset.reader import IndexedDataset, token_dtype
from ctxlm_ds.errors import DataError
from tests.sample_data import DatasetWriter

Documents = list[list[list[int]]]


def _documents(seed: int, highest: int, count: int = 40) -> Documents:
    rng = np.random.default_rng(seed)
    documents: Documents = []
    for _ in range(count):
        lengths = rng.integers(1, 30, size=rng.integers(0, 6))
        documents.append([rng.integers(0, highest, size=length).tolist() for length in lengths])
    return documents


def _write(prefix: Path, documents: Documents, dtype: str = "uint16", **metadata: object) -> IndexedDataset:
    with DatasetWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
        writer.finalize(dict(metadata))
    return IndexedDataset(prefix)


def _read(dataset: IndexedDataset) -> Documents:
    return [[sequence.tolist() for sequence in dataset.document(i)] for i in range(dataset.num_documents)]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    _write(tmp_path / "data", _documents(1, 1000), vocab_size=1000)
    return tmp_path / "data"


def _edit(path: Path, change: Callable[[bytearray], bytearray | bytes]) -> None:
    path.write_bytes(bytes(change(bytearray(path.read_bytes()))))


def _expect(prefix: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(30_522, np.uint16), (65_499, np.uint16), (65_500, np.int32)])
def test_same_bytes_as_megatron_core_and_each_reads_the_other(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

    documents = _documents(2, vocab_size)
    assert token_dtype(vocab_size) == dtype == DType.optimal_dtype(vocab_size)
    ours = _write(tmp_path / "ours", documents, token_dtype(vocab_size).name)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for extension in ("bin", "idx"):
        assert (tmp_path / f"ours.{extension}").read_bytes() == (tmp_path / f"theirs.{extension}").read_bytes()
    theirs = IndexedDataset(tmp_path / "theirs")
    assert theirs.metadata is None
    assert _read(theirs) == _read(ours) == documents
    megatron = MegatronDataset(str(tmp_path / "ours"))
    assert [megatron[i].tolist() for i in range(len(megatron))] == [s for document in documents for s in document]
    assert np.array_equal(megatron.document_indices, ours.document_indices)
    assert np.array_equal(megatron.sequence_lengths, ours.lengths(0, len(ours)))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_integer_type_round_trips(tmp_path: Path, dtype: str) -> None:
    documents = _documents(3, 127)
    dataset = _write(tmp_path / "data", documents, dtype)
    assert dataset.dtype == np.dtype(dtype)
    assert _read(dataset) == documents


def test_arrays(prefix: Path) -> None:
    documents = _documents(1, 1000)
    dataset = IndexedDataset(prefix)
    flat = [token for document in documents for sequence in document for token in sequence]
    lengths = [len(sequence) for document in documents for sequence in document]
    assert dataset.tokens.tolist() == flat
    assert dataset.lengths(0, len(dataset)).tolist() == lengths
    assert (dataset.num_documents, dataset.num_sequences, dataset.num_tokens) == (40, len(lengths), len(flat))
    assert dataset.document_indices.flags.aligned
    again = pickle.loads(pickle.dumps(dataset))
    assert again.fingerprint == dataset.fingerprint
    assert again.tokens.tolist() == flat


def test_bulk_writing_gives_the_same_bytes(prefix: Path, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "bulk", "uint16") as writer:
        for document in _documents(1, 1000):
            flat = np.array([token for sequence in document for token in sequence], dtype=np.int32)
            lengths = [len(sequence) for sequence in document]
            writer.add_documents(flat, lengths, np.array([len(lengths)]))
        writer.finalize({"vocab_size": 1000})
    for extension in ("bin", "idx", "json"):
        assert (tmp_path / f"bulk.{extension}").read_bytes() == Path(f"{prefix}.{extension}").read_bytes()


def test_empty_dataset(tmp_path: Path) -> None:
    dataset = _write(tmp_path / "data", [])
    assert (dataset.num_documents, dataset.num_tokens, len(dataset)) == (0, 0, 0)


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    documents = _documents(5, 100)
    fingerprints = {_write(tmp_path / "a", documents).fingerprint, _write(tmp_path / "b", documents).fingerprint}
    assert len(fingerprints) == 1
    documents[-1].append([5])
    fingerprints.add(_write(tmp_path / "c", documents).fingerprint)
    documents[-1][-1][0] = 6  # only an id in .bin differs
    fingerprints.add(_write(tmp_path / "d", documents).fingerprint)
    assert len(fingerprints) == 3


@pytest.mark.parametrize("extension", ["bin", "idx"])
def test_missing_file(prefix: Path, extension: str) -> None:
    Path(f"{prefix}.{extension}").unlink()
    _expect(prefix, rf"data\.{extension}: no such file")


def test_missing_dataset_names_what_is_there(prefix: Path) -> None:
    with pytest.raises(DataError, match="datasets in that folder: data"):
        IndexedDataset(prefix.with_name("dat"))
    with pytest.raises(DataError, match="without its extension"):
        IndexedDataset(f"{prefix}.idx")


@pytest.mark.parametrize("extension", ["bin", "idx"])
@pytest.mark.parametrize("cut", [1, 2, 7, 50])
def test_truncated_file(prefix: Path, extension: str, cut: int) -> None:
    _edit(Path(f"{prefix}.{extension}"), lambda data: data[:-cut])
    _expect(prefix, "cut short")


@pytest.mark.parametrize("size", [0, 5, 9, 33])
def test_index_shorter_than_its_header(prefix: Path, size: int) -> None:
    _edit(Path(f"{prefix}.idx"), lambda data: data[:size])
    _expect(prefix, "not an indexed dataset")


def test_extra_bytes(prefix: Path) -> None:
    _edit(Path(f"{prefix}.bin"), lambda data: data + b"\0\0\0\0\0\0")
    _expect(prefix, "but the index asks for")


def _pack(layout: str, offset: int, value: int) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        struct.pack_into(layout, data, offset, value)
        return data

    return change


@pytest.mark.parametrize(
    ("layout", "offset", "value", "message"),
    [
        ("<B", 0, 65, "not an indexed dataset"),
        ("<Q", 9, 2, "version 2"),
        ("<B", 17, 0, "dtype code 0"),
        ("<B", 17, 9, "dtype code 9"),
        ("<B", 17, 6, "float64 values"),
        ("<B", 17, 4, "offset of sequence 1"),
        ("<B", 17, 3, None),
        ("<Q", 18, 2**63, "header asks for"),
        ("<Q", 18, 2**64 - 1, "header asks for"),
        ("<Q", 26, 2**62, "header asks for"),
        ("<Q", 26, 0, "header asks for"),
        ("<i", 34, -5, "negative length"),
        ("<i", 34, 2**31 - 1, "offset of sequence 1"),
    ],
)
def test_damaged_header_and_lengths(prefix: Path, layout: str, offset: int, value: int, message: str | None) -> None:
    _edit(Path(f"{prefix}.idx"), _pack(layout, offset, value))
    if message is None:  # int16 has uint16's size: only the recorded dtype tells
        message = "says dtype 'uint16', the files hold 'int16'"
    _expect(prefix, message)


def test_damaged_offsets_and_documents(prefix: Path) -> None:
    path, count = Path(f"{prefix}.idx"), IndexedDataset(prefix).num_sequences
    original = path.read_bytes()
    _edit(path, _pack("<q", 34 + 4 * count + 8 * 3, 7))
    _expect(prefix, "offset of sequence 3")
    path.write_bytes(original)
    _edit(path, _pack("<q", 34 + 12 * count, 1))
    _expect(prefix, "document index runs from 1")
    path.write_bytes(original)
    _edit(path, _pack("<q", 34 + 12 * count + 8 * 4, 10**6))
    _expect(prefix, "goes backwards")
    path.write_bytes(original)
    _edit(path, _pack("<q", len(original) - 8, 3))
    _expect(prefix, "document index runs from 0 to 3")


def test_no_document_index_at_all(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"")
    (tmp_path / "data.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 0))
    _expect(tmp_path / "data", "no document index")


def test_fairseq_layout_with_the_same_magic(tmp_path: Path) -> None:
    lengths = np.array([3, 4, 5], dtype=np.int32)
    pointers = (np.cumsum(lengths) - lengths).astype(np.int64) * 2
    head = struct.pack("<9sQBQ", b"MMIDIDX\0\0", 1, 8, len(lengths))
    (tmp_path / "data.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes())
    (tmp_path / "data.bin").write_bytes(np.arange(12, dtype=np.uint16).tobytes())
    _expect(tmp_path / "data", "fairseq")


def test_multimodal_format(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from torch import tensor

    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.uint16, multimodal=True)
    builder.add_item(tensor([1, 2, 3]), 1)
    builder.end_document()
    builder.finalize(str(tmp_path / "data.idx"))
    _expect(tmp_path / "data", "multimodal")


def test_documents_lost_by_an_old_merge(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    content = bytearray(Path(f"{prefix}.idx").read_bytes()[: 34 + 12 * dataset.num_sequences] + bytes(8))
    struct.pack_into("<Q", content, 26, 1)
    Path(f"{prefix}.idx").write_bytes(content)
    Path(f"{prefix}.json").unlink()
    _expect(prefix, "no document: joined by a merge of old versions")


def test_a_pickled_dataset_is_checked_again_only_where_its_files_changed(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    stored = pickle.dumps(dataset)
    assert pickle.loads(stored).fingerprint == dataset.fingerprint
    _edit(Path(f"{prefix}.idx"), _pack("<i", 34, -5))
    with pytest.raises(DataError, match="negative length"):
        pickle.loads(stored)


def test_the_recorded_checksum_shows_a_change_of_the_index_that_still_fits(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices
    moved = int(np.flatnonzero(np.diff(bounds) > 1)[0])
    _edit(Path(f"{prefix}.idx"), _pack("<q", 34 + 12 * len(dataset) + 8 * (moved + 1), int(bounds[moved + 1]) - 1))
    changed = IndexedDataset(prefix)
    with pytest.raises(DataError, match=r"data\.idx: sha256 .* records"):
        _ = changed.fingerprint


def test_megatron_deepspeed_end_tokens_missing_from_the_lengths(tmp_path: Path) -> None:
    documents = _documents(6, 100)
    _write(tmp_path / "data", documents)
    Path(tmp_path / "data.json").unlink()
    corrupt = [token for document in documents if document for token in [t for s in document for t in s] + [99]]
    (tmp_path / "data.bin").write_bytes(np.array(corrupt, dtype=np.uint16).tobytes())
    _expect(tmp_path / "data", "left end-of-document tokens out of the lengths")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"format": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ("[]", "expected an object"),
        ('{"format": "other"}', "does not describe"),
    ],
)
def test_damaged_json(prefix: Path, content: str, message: str) -> None:
    Path(f"{prefix}.json").write_text(content)
    _expect(prefix, r"data\.json: sha256 .* --write-manifest")
    Path(f"{prefix}.sha256").unlink()
    _expect(prefix, message)


@pytest.mark.parametrize(("key", "value"), [("tokens", 5), ("documents", 1), ("sequences", 0), ("dtype", "int32")])
def test_json_of_another_dataset(prefix: Path, key: str, value: object) -> None:
    path = Path(f"{prefix}.json")
    Path(f"{prefix}.sha256").unlink()
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    _expect(prefix, f"says {key}")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    _expect(prefix, "version 2")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", "many", "vocab_size is 'many' .*valid integer"),
        ("vocab_size", -3, "vocab_size is '-3' .*greater than or equal to 0"),
        ("split_sentences", 1, "split_sentences is '1' .*valid boolean"),
        ("tokenizer_path", ["tok"], "tokenizer_path is .*valid string"),
        ("inputs", [1], r"inputs is '\[1\]' .*valid string"),
        ("sha256", {"bin": None}, "sha256 is .*valid string"),
        ("eod_id", 1000, "eod_id 1000 is outside the vocabulary of 1000"),
        ("parts", ["a"], "parts is .*valid dictionary"),
        ("shard", [3, 3], r"shard is \[3, 3\]"),
    ],
)
def test_json_with_fields_of_another_type(prefix: Path, key: str, value: object, message: str) -> None:
    Path(f"{prefix}.sha256").unlink()
    path = Path(f"{prefix}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    _expect(prefix, message)


def test_verify_finds_a_flipped_bit_and_ids_outside_the_vocabulary(prefix: Path, tmp_path: Path) -> None:
    proofs = "\n".join(verify_dataset(IndexedDataset(prefix)))
    assert "sha256 of .bin, .idx equal those in data.json" in proofs
    assert "sha256 of .bin, .idx, .json equal those in data.sha256" in proofs
    original = Path(f"{prefix}.bin").read_bytes()
    _edit(Path(f"{prefix}.bin"), lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(DataError, match=r"data\.bin: sha256"):
        verify_dataset(IndexedDataset(prefix))
    Path(f"{prefix}.bin").write_bytes(original)
    outside = _write(tmp_path / "outside", _documents(1, 1000), vocab_size=500)
    with pytest.raises(DataError, match="the vocabulary has 0 to 499"):
        verify_dataset(outside)
    negative = _write(tmp_path / "negative", [[[1, -2]]], "int32")
    with pytest.raises(DataError, match="ids from -2"):
        verify_dataset(negative)


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
        _write(tmp_path / "data", _documents(1, 1000))
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
    _expect(tmp_path / "data", "no such file")
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
    assert _read(IndexedDataset(prefix)) == [[[7, 8]]]


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

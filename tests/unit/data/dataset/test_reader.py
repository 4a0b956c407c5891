"""Indexed datasets against megatron-core's own builder and reader, TNTIDX datasets, and files that must be refused."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.dataset.merge import merge_datasets
from ctxlm_ds.data.dataset.reader import IndexedDataset, token_dtype
from ctxlm_ds.data.index.sentence_table import sentence_table
from ctxlm_ds.errors import DataError
from tests.sample_data import DatasetWriter, ends_of, starts_of, write_dataset

Documents = list[list[list[int]]]


def documents_of(seed: int, highest: int, count: int = 40) -> Documents:
    rng = np.random.default_rng(seed)
    documents: Documents = []
    for _ in range(count):
        lengths = rng.integers(1, 30, size=rng.integers(0, 6))
        documents.append([rng.integers(0, highest, size=length).tolist() for length in lengths])
    return documents


def write_documents(prefix: Path, documents: Documents, dtype: str = "uint16", **metadata: object) -> IndexedDataset:
    with DatasetWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
        writer.finalize(dict(metadata))
    return IndexedDataset(prefix)


def read_documents(dataset: IndexedDataset) -> Documents:
    return [[sequence.tolist() for sequence in dataset.document(i)] for i in range(dataset.num_documents)]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_documents(tmp_path / "data", documents_of(1, 1000), vocab_size=1000)
    return tmp_path / "data"


def edit(path: Path, change: Callable[[bytearray], bytearray | bytes]) -> None:
    path.write_bytes(bytes(change(bytearray(path.read_bytes()))))


def expect_refusal(prefix: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(30_522, np.uint16), (65_499, np.uint16), (65_500, np.int32)])
def test_same_bytes_as_megatron_core_and_each_reads_the_other(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

    documents = documents_of(2, vocab_size)
    assert token_dtype(vocab_size) == dtype == DType.optimal_dtype(vocab_size)
    ours = write_documents(tmp_path / "ours", documents, token_dtype(vocab_size).name)
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
    assert read_documents(theirs) == read_documents(ours) == documents
    megatron = MegatronDataset(str(tmp_path / "ours"))
    assert [megatron[i].tolist() for i in range(len(megatron))] == [s for document in documents for s in document]
    assert np.array_equal(megatron.document_indices, ours.document_indices)
    assert np.array_equal(megatron.sequence_lengths, ours.lengths(0, len(ours)))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_integer_type_round_trips(tmp_path: Path, dtype: str) -> None:
    documents = documents_of(3, 127)
    dataset = write_documents(tmp_path / "data", documents, dtype)
    assert dataset.dtype == np.dtype(dtype)
    assert read_documents(dataset) == documents


def test_empty_dataset(tmp_path: Path) -> None:
    dataset = write_documents(tmp_path / "data", [])
    assert (dataset.num_documents, dataset.num_tokens, len(dataset)) == (0, 0, 0)


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    documents = documents_of(5, 100)
    fingerprints = {
        write_documents(tmp_path / "a", documents).fingerprint,
        write_documents(tmp_path / "b", documents).fingerprint,
    }
    assert len(fingerprints) == 1
    documents[-1].append([5])
    fingerprints.add(write_documents(tmp_path / "c", documents).fingerprint)
    documents[-1][-1][0] = 6  # only an id in .bin differs
    fingerprints.add(write_documents(tmp_path / "d", documents).fingerprint)
    assert len(fingerprints) == 3


@pytest.mark.parametrize("extension", ["bin", "idx"])
def test_missing_file(prefix: Path, extension: str) -> None:
    Path(f"{prefix}.{extension}").unlink()
    expect_refusal(prefix, rf"data\.{extension}: no such file")


def test_missing_dataset_names_what_is_there(prefix: Path) -> None:
    with pytest.raises(DataError, match="datasets in that folder: data"):
        IndexedDataset(prefix.with_name("dat"))
    with pytest.raises(DataError, match="without its extension"):
        IndexedDataset(f"{prefix}.idx")


@pytest.mark.parametrize("extension", ["bin", "idx"])
@pytest.mark.parametrize("cut", [1, 2, 7, 50])
def test_truncated_file(prefix: Path, extension: str, cut: int) -> None:
    edit(Path(f"{prefix}.{extension}"), lambda data: data[:-cut])
    expect_refusal(prefix, "cut short")


@pytest.mark.parametrize("size", [0, 5, 9, 33])
def test_index_shorter_than_its_header(prefix: Path, size: int) -> None:
    edit(Path(f"{prefix}.idx"), lambda data: data[:size])
    expect_refusal(prefix, "not an indexed dataset")


def test_extra_bytes(prefix: Path) -> None:
    edit(Path(f"{prefix}.bin"), lambda data: data + b"\0\0\0\0\0\0")
    expect_refusal(prefix, "but the index asks for")


def pack(layout: str, offset: int, value: int) -> Callable[[bytearray], bytearray]:
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
    edit(Path(f"{prefix}.idx"), pack(layout, offset, value))
    if message is None:  # int16 has uint16's size: only the recorded dtype tells
        message = "says dtype 'uint16', the files hold 'int16'"
    expect_refusal(prefix, message)


def test_damaged_offsets_and_documents(prefix: Path) -> None:
    path, count = Path(f"{prefix}.idx"), IndexedDataset(prefix).num_sequences
    original = path.read_bytes()
    edit(path, pack("<q", 34 + 4 * count + 8 * 3, 7))
    expect_refusal(prefix, "offset of sequence 3")
    path.write_bytes(original)
    edit(path, pack("<q", 34 + 12 * count, 1))
    expect_refusal(prefix, "document index runs from 1")
    path.write_bytes(original)
    edit(path, pack("<q", 34 + 12 * count + 8 * 4, 10**6))
    expect_refusal(prefix, "goes backwards")
    path.write_bytes(original)
    edit(path, pack("<q", len(original) - 8, 3))
    expect_refusal(prefix, "document index runs from 0 to 3")


def test_no_document_index_at_all(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"")
    (tmp_path / "data.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 0))
    expect_refusal(tmp_path / "data", "no document index")


def test_fairseq_layout_with_the_same_magic(tmp_path: Path) -> None:
    lengths = np.array([3, 4, 5], dtype=np.int32)
    pointers = (np.cumsum(lengths) - lengths).astype(np.int64) * 2
    head = struct.pack("<9sQBQ", b"MMIDIDX\0\0", 1, 8, len(lengths))
    (tmp_path / "data.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes())
    (tmp_path / "data.bin").write_bytes(np.arange(12, dtype=np.uint16).tobytes())
    expect_refusal(tmp_path / "data", "fairseq")


def test_multimodal_format(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from torch import tensor

    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.uint16, multimodal=True)
    builder.add_item(tensor([1, 2, 3]), 1)
    builder.end_document()
    builder.finalize(str(tmp_path / "data.idx"))
    expect_refusal(tmp_path / "data", "multimodal")


def test_documents_lost_by_an_old_merge(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    content = bytearray(Path(f"{prefix}.idx").read_bytes()[: 34 + 12 * dataset.num_sequences] + bytes(8))
    struct.pack_into("<Q", content, 26, 1)
    Path(f"{prefix}.idx").write_bytes(content)
    Path(f"{prefix}.json").unlink()
    expect_refusal(prefix, "no document: joined by a merge of old versions")


def test_a_pickled_dataset_is_checked_again_only_where_its_files_changed(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    stored = pickle.dumps(dataset)
    assert pickle.loads(stored).fingerprint == dataset.fingerprint
    edit(Path(f"{prefix}.idx"), pack("<i", 34, -5))
    with pytest.raises(DataError, match="negative length"):
        pickle.loads(stored)


def test_the_recorded_checksum_shows_a_change_of_the_index_that_still_fits(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices
    moved = int(np.flatnonzero(np.diff(bounds) > 1)[0])
    edit(Path(f"{prefix}.idx"), pack("<q", 34 + 12 * len(dataset) + 8 * (moved + 1), int(bounds[moved + 1]) - 1))
    changed = IndexedDataset(prefix)
    with pytest.raises(DataError, match=r"data\.idx: sha256 .* records"):
        _ = changed.fingerprint


def test_megatron_deepspeed_end_tokens_missing_from_the_lengths(tmp_path: Path) -> None:
    documents = documents_of(6, 100)
    write_documents(tmp_path / "data", documents)
    Path(tmp_path / "data.json").unlink()
    corrupt = [token for document in documents if document for token in [t for s in document for t in s] + [99]]
    (tmp_path / "data.bin").write_bytes(np.array(corrupt, dtype=np.uint16).tobytes())
    expect_refusal(tmp_path / "data", "left end-of-document tokens out of the lengths")


def test_verify_finds_a_flipped_bit_and_ids_outside_the_vocabulary(prefix: Path, tmp_path: Path) -> None:
    proofs = "\n".join(verify_dataset(IndexedDataset(prefix)))
    assert "sha256 of .bin, .idx equal those in data.json" in proofs
    assert "sha256 of .bin, .idx, .json equal those in data.sha256" in proofs
    original = Path(f"{prefix}.bin").read_bytes()
    edit(Path(f"{prefix}.bin"), lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(DataError, match=r"data\.bin: sha256"):
        verify_dataset(IndexedDataset(prefix))
    Path(f"{prefix}.bin").write_bytes(original)
    outside = write_documents(tmp_path / "outside", documents_of(1, 1000), vocab_size=500)
    with pytest.raises(DataError, match="the vocabulary has 0 to 499"):
        verify_dataset(outside)
    negative = write_documents(tmp_path / "negative", [[[1, -2]]], "int32")
    with pytest.raises(DataError, match="ids from -2"):
        verify_dataset(negative)


DOCUMENTS: Documents = [[[5, 6, 7], [8]], [], [[9, 10]], [[11, 12, 13, 14], [15], [16, 17]]]


class OldBuilder:
    """The arrays that IndexedDatasetBuilder keeps, and the order in which its finalize writes them."""

    codes = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}

    def __init__(self, prefix: Path, dtype: str = "int32") -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.tokens = b""
        self.data_offsets, self.dim_offsets = [0], [0]
        self.sizes: list[int] = []
        self.doc_idx = [0]

    def add_item(self, ids: list[int] | np.ndarray) -> None:
        array = np.array(ids, dtype=self.dtype)
        self.tokens += array.tobytes()
        self.data_offsets.append(self.data_offsets[-1] + array.size)
        self.sizes.extend(array.shape)
        self.dim_offsets.append(self.dim_offsets[-1] + array.ndim)

    def end_document(self) -> None:
        self.doc_idx.append(len(self.sizes))

    def finalize(self, documents: bool = True) -> None:
        """`documents=False`: fairseq's original, which has neither their count nor their array."""
        Path(f"{self.prefix}.bin").write_bytes(self.tokens)
        numbers = [1, self.codes[self.dtype.name], self.dtype.itemsize, len(self.data_offsets) - 1, len(self.sizes)]
        arrays = [self.dim_offsets, self.data_offsets, self.sizes]
        if documents:
            numbers.append(len(self.doc_idx))
            arrays.append(self.doc_idx)
        content = b"TNTIDX\x00\x00" + struct.pack(f"<{len(numbers)}Q", *numbers)
        content += b"".join(np.array(array, dtype=np.int64).tobytes() for array in arrays)
        Path(f"{self.prefix}.idx").write_bytes(content)


def write_old(prefix: Path, documents: Documents, dtype: str = "int32", document_index: bool = True) -> Path:
    builder = OldBuilder(prefix, dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(sequence)
        builder.end_document()
    builder.finalize(document_index)
    return prefix


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "uint16"])
def test_reads_as_any_other_dataset(tmp_path: Path, dtype: str) -> None:
    dataset = IndexedDataset(write_old(tmp_path / "old", DOCUMENTS, dtype))
    assert dataset.dtype == np.dtype(dtype)
    assert read_documents(dataset) == DOCUMENTS
    assert dataset.lengths(0, 6).tolist() == [3, 1, 2, 4, 1, 2]
    assert dataset.document_indices.tolist() == [0, 2, 2, 3, 6]
    assert dataset.document_tokens(1, 4).tolist() == [0, 2, 7]
    assert dataset.document_sequences(1, 4).tolist() == [0, 1, 3]
    assert dataset.tokens.tolist() == list(range(5, 18))
    assert "ids: 5 to 17" in verify_dataset(dataset)


def test_joining_one_writes_it_in_the_present_format(tmp_path: Path) -> None:
    merge_datasets([str(write_old(tmp_path / "old", DOCUMENTS))], tmp_path / "joined")
    write_dataset(tmp_path / "new", DOCUMENTS)
    for extension in ("bin", "idx"):
        assert (tmp_path / f"joined.{extension}").read_bytes() == (tmp_path / f"new.{extension}").read_bytes()
    assert not (tmp_path / "joined.json").exists()


def test_samples_are_made_from_it(tmp_path: Path) -> None:
    write_dataset(tmp_path / "new", DOCUMENTS)
    table = sentence_table(IndexedDataset(write_old(tmp_path / "old", DOCUMENTS)), 3)
    expected = sentence_table(IndexedDataset(tmp_path / "new"), 3)
    assert starts_of(table).tolist() == starts_of(expected).tolist()
    assert ends_of(table).tolist() == ends_of(expected).tolist()


def test_fairseqs_original_is_named(tmp_path: Path) -> None:
    expect_refusal(write_old(tmp_path / "old", DOCUMENTS, document_index=False), "fairseq's dataset format")


def test_sequences_of_two_dimensions_are_refused(tmp_path: Path) -> None:
    builder = OldBuilder(tmp_path / "old")
    builder.add_item([1])
    builder.add_item(np.ones((2, 3)))
    builder.end_document()
    builder.finalize()
    expect_refusal(tmp_path / "old", "sequence 1 is not one run of tokens")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (8, 2, "version 2"),
        (16, 7, "float32 values"),
        (16, 77, "dtype code 77"),
        (24, 2, "tokens of 2 bytes, int32 has 4"),
        (32, 2**62, "header asks for"),
        (32, -1, "header asks for"),
        (40, 2**40, "header asks for"),
        (48, 0, "header asks for"),
        (56 + 8 * 3, 5, "sequence 2 is not one run"),
        (56 + 8 * 7 + 8 * 2, 5, "offset of sequence 2"),
        (56 + 8 * 14 + 8, -1, "sequence 1 has a negative length"),
        (56 + 8 * 14 + 8, 2**40, "more than the 2147483647"),
        (56 + 8 * 20 + 8, 5, "goes backwards"),
        (56 + 8 * 24, 5, "runs from 0 to 5"),
    ],
)
def test_damaged_index(tmp_path: Path, offset: int, value: int, message: str) -> None:
    write_old(tmp_path / "old", DOCUMENTS)
    edit(tmp_path / "old.idx", pack("<q", offset, value))
    expect_refusal(tmp_path / "old", message)

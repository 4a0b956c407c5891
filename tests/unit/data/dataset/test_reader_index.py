"""TNTIDX datasets, written as Megatron-DeepSpeed's IndexedDatasetBuilder does it, and those that must be refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.dataset.merge import merge_datasets
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.sentence_table import sentence_table
from ctxlm_ds.errors import DataError
from tests.sample_data import ends_of, starts_of, write_dataset

Documents = list[list[list[int]]]
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


def _read(dataset: IndexedDataset) -> Documents:
    return [[sequence.tolist() for sequence in dataset.document(i)] for i in range(dataset.num_documents)]


def _expect(prefix: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


def _patch(prefix: Path, offset: int, value: int) -> None:
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    struct.pack_into("<q", content, offset, value)
    Path(f"{prefix}.idx").write_bytes(content)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "uint16"])
def test_reads_as_any_other_dataset(tmp_path: Path, dtype: str) -> None:
    dataset = IndexedDataset(write_old(tmp_path / "old", DOCUMENTS, dtype))
    assert dataset.dtype == np.dtype(dtype)
    assert _read(dataset) == DOCUMENTS
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
    _expect(write_old(tmp_path / "old", DOCUMENTS, document_index=False), "fairseq's dataset format")


def test_sequences_of_two_dimensions_are_refused(tmp_path: Path) -> None:
    builder = OldBuilder(tmp_path / "old")
    builder.add_item([1])
    builder.add_item(np.ones((2, 3)))
    builder.end_document()
    builder.finalize()
    _expect(tmp_path / "old", "sequence 1 is not one run of tokens")


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
    _patch(write_old(tmp_path / "old", DOCUMENTS), offset, value)
    _expect(tmp_path / "old", message)

"""What a person reads of a dataset."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.dataset import inspection
from ctxlm_ds.data.dataset.inspection import (
    count_unknown,
    describe,
    open_tokenizer,
    show_documents,
    unknown_advice,
    verify_dataset,
)
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.sample_data import DatasetWriter, write_dataset
from tests.text import write_corpus


@pytest.fixture
def made(tmp_path: Path) -> tuple[IndexedDataset, list[str]]:
    documents = write_corpus(tmp_path / "corpus.jsonl", 40)
    train_tokenizer("bpe", documents, 500, tmp_path / "tokenizer")
    config = PreprocessConfig(split_sentences=True)
    (result,) = preprocess([str(tmp_path / "corpus.jsonl")], tmp_path / "tokenizer", tmp_path / "set", config)
    return IndexedDataset(result.prefix), documents


def test_documents_come_back_as_text_sentence_by_sentence(made: tuple[IndexedDataset, list[str]]) -> None:
    dataset, documents = made
    lines = list(show_documents(dataset, open_tokenizer(dataset, None), 2, first=3))
    sentences = split_sentences(documents[3])
    assert lines[1] == f"document 3: {len(sentences)} sequences"
    for number, (line, sentence) in enumerate(zip(lines[2:], sentences, strict=False), start=1):
        length = len(dataset.sequence(dataset.document_indices[3] + number - 1))
        assert line == f"  [{number}] ({length}) {sentence}"
    assert sum(line.startswith("document ") for line in lines) == 2
    with pytest.raises(DataError, match="has documents 0 to 39, not 40"):
        list(show_documents(dataset, None, 1, first=40))


def test_figures(made: tuple[IndexedDataset, list[str]]) -> None:
    dataset, documents = made
    text = "\n".join(describe(dataset))
    sentences = sum(len(split_sentences(document)) for document in documents)
    assert f"documents     {len(documents):,}" in text
    assert f"sentences     {sentences:,}" in text
    assert f"tokens        {len(dataset.tokens):,} (uint16" in text
    longest = max(len(split_sentences(document)) for document in documents)
    assert f"1 to {longest} sentences" in text


def test_a_dataset_of_megatron_without_json_shows_ids(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [[[5, 6, 7]]])
    for extension in ("json", "sha256"):
        (tmp_path / f"data.{extension}").unlink()
    dataset = IndexedDataset(tmp_path / "data")
    assert open_tokenizer(dataset, None) is None
    assert list(show_documents(dataset, None, 5))[-1] == "  [1] (3) 5 6 7"
    assert any("none recorded" in proof for proof in verify_dataset(dataset))


def test_only_a_text_that_gives_the_same_ids_is_verified(made: tuple[IndexedDataset, list[str]]) -> None:
    dataset = made[0]
    assert "60 of 60 sampled sequences decode to text" in verify_dataset(dataset)[-1]
    file = Path(str(dataset.metadata["tokenizer_path"])) / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"decoder": None}))
    assert "text: not compared (tokenizer.json has no decoder" in verify_dataset(dataset)[-1]
    joined = {"type": "Replace", "pattern": {"String": "\u0120"}, "content": ""}
    file.write_text(json.dumps(content | {"decoder": joined}))
    with pytest.raises(DataError, match=r"only 0 of 60 sampled sequences .*; preprocess it again"):
        verify_dataset(dataset)


def test_a_comparison_of_unknown_words_is_not_called_verified(tmp_path: Path) -> None:
    train_tokenizer("wordpiece", ["some text"] * 4, 60, tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("some \u00d8 text some text\n")
    (result,) = preprocess([str(tmp_path / "text.txt")], tmp_path / "tokenizer", tmp_path / "set", PreprocessConfig())
    assert verify_dataset(IndexedDataset(result.prefix))[-1].endswith("(1 sampled sequence, all with unknown words)")


def test_unknown_tokens_are_read_or_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer("wordpiece", ["some text"] * 4, 60, tmp_path / "tokenizer")
    for name, record in (("with", {"unknown_tokens": 1}), ("without", {})):
        with DatasetWriter(tmp_path / name, "int32") as writer:
            writer.add_sequence([5, tokenizer.unk_id, 7, 5])
            writer.end_document()
            writer.finalize(record)
    monkeypatch.setattr(inspection, "_BLOCK_TOKENS", 3)
    assert count_unknown(IndexedDataset(tmp_path / "with"), None) == (1, 4)
    assert count_unknown(IndexedDataset(tmp_path / "without"), tokenizer) == (1, 3)
    assert count_unknown(IndexedDataset(tmp_path / "without"), None) is None
    words = [line for line in describe(IndexedDataset(tmp_path / "with")) if line.startswith("words")]
    assert words == ["words         not counted, preprocess again"]
    assert unknown_advice(1, 100, None) == unknown_advice(0, 0, None) == ""
    assert unknown_advice(2, 100, {}) == "2.0% of the tokens are unknown, their text is lost"
    assert unknown_advice(2, 100, {"unknown_cause": "because"}).endswith("; because")


def test_long_sequences_and_documents_are_cut_for_the_eye(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [[[1] * 10_000], [[5, 6, 7]] * 3_000])
    lines = list(show_documents(IndexedDataset(tmp_path / "data"), None, 2))
    heading = lines.index("document 1: 3000 sequences")
    assert lines[heading - 2].endswith("… (9,800 more tokens)")
    assert len(lines) == heading + 22 and lines[-1] == "  … (2,980 more sequences, 8,940 tokens)"


def test_the_tokenizer_may_be_a_vocabulary_file(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "some", "text"]))
    (tmp_path / "text.txt").write_text("some text\n\ntext\n")
    (result,) = preprocess([str(tmp_path / "text.txt")], tmp_path / "vocab.txt", tmp_path / "set", PreprocessConfig())
    proofs = verify_dataset(IndexedDataset(result.prefix))
    assert any(line.startswith(f"tokenizer: {tmp_path}/vocab.txt has the recorded fingerprint") for line in proofs)
    assert "is not here" not in "\n".join(proofs)


def test_a_missing_or_other_tokenizer(made: tuple[IndexedDataset, list[str]], tmp_path: Path) -> None:
    dataset, documents = made
    train_tokenizer("bpe", documents, 600, tmp_path / "other")
    with pytest.raises(DataError, match="made with a tokenizer of fingerprint"):
        open_tokenizer(dataset, tmp_path / "other")
    shutil.move(tmp_path / "tokenizer", tmp_path / "moved")
    assert open_tokenizer(dataset, None) is None
    assert any("not compared" in proof for proof in verify_dataset(dataset))
    assert open_tokenizer(dataset, tmp_path / "moved") is not None
    assert any("has the recorded fingerprint" in proof for proof in verify_dataset(dataset, tmp_path / "moved"))


def test_figures_of_long_datasets_come_from_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, size=5000)
    with DatasetWriter(tmp_path / "data", "int32") as writer:
        for first in range(0, 5000, 10):
            part = lengths[first : first + 10]
            writer.add_documents(np.zeros(part.sum(), dtype=np.int32), part, np.array([len(part)]))
        writer.finalize({})
    dataset = IndexedDataset(tmp_path / "data")
    exact = list(describe(dataset))
    monkeypatch.setattr(inspection, "_BLOCK_ITEMS", 64)
    sampled = list(describe(dataset))
    middle = f"median {np.median(lengths):,.0f}, mean {lengths.mean():,.1f}"
    assert f"a sequence    {lengths.min():,} to {lengths.max():,} tokens, {middle}" in "\n".join(exact)
    for line, other in zip(exact, sampled, strict=True):
        pattern = r"(.*), median ([\d,]+), mean (.*), 95 % up to ([\d,]+)"
        match, other_match = re.fullmatch(pattern, line), re.fullmatch(pattern, other)
        if match is None or other_match is None:
            assert line == other
            continue
        assert (match[1], match[3]) == (other_match[1], other_match[3])
        medians = [int(found[2].replace(",", "")) for found in (match, other_match)]
        assert medians[1] == pytest.approx(medians[0], rel=0.3)


def test_what_was_joined_is_shown(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", "int32") as writer:
        parts = [{"name": name} for name in "abc"]
        writer.finalize({"parts": parts, "inputs": ["x"] * 20})
    text = "\n".join(describe(IndexedDataset(tmp_path / "data")))
    assert "joined from   3 parts, a to c" in text
    assert "and 12 more" in text

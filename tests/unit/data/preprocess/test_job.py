"""Documents to datasets: metadata, empty documents, several keys, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.errors import DataError, TokenizerError
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import write_corpus
from tests.unit.data.conftest import DOCUMENTS
from tests.unit.data.dataset.test_reader import read_documents


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl", 120, seed=7)
    return tmp_path / "corpus.jsonl"


def run(corpus: Path, tokenizer: Path, **settings: object) -> IndexedDataset:
    config = PreprocessConfig(**settings)  # type: ignore[arg-type]
    (result,) = preprocess([str(corpus)], tokenizer, corpus.parent / "out" / "set", config)
    return IndexedDataset(result.prefix)


def test_metadata(corpus: Path, tokenizers: dict[str, Path]) -> None:
    dataset = run(corpus, tokenizers["wordpiece"], split_sentences=True, append_eod=True)
    tokenizer = load_tokenizer(tokenizers["wordpiece"])
    metadata = dataset.metadata
    assert metadata is not None
    assert metadata["tokenizer_fingerprint"] == tokenizer.fingerprint
    assert metadata["tokenizer_path"] == str(tokenizers["wordpiece"])
    assert (metadata["vocab_size"], metadata["eod_id"]) == (tokenizer.vocab_size, tokenizer.sep_id)
    assert metadata["split_sentences"] is metadata["append_eod"] is True
    assert (metadata["documents"], metadata["empty_documents"], metadata["bad_records"]) == (120, 0, 0)
    assert metadata["input_bytes"] == corpus.stat().st_size
    assert metadata["characters"] == sum(map(len, DOCUMENTS))
    assert metadata["words"] == sum(len(document.split()) for document in DOCUMENTS)
    assert verify_dataset(dataset)


def test_empty_documents_are_left_out_and_counted(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    texts = ["", "One here. Two there.", "  \n ", None, "\u0000\u0007", "Three."]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    dataset = run(path, tokenizers["wordpiece"], split_sentences=True, append_eod=True)
    assert dataset.num_documents == 2 and dataset.num_sequences == 3
    assert dataset.metadata is not None and dataset.metadata["empty_documents"] == 4
    assert [document[-1][-1] for document in read_documents(dataset)] == [3, 3]


def test_unknown_tokens_are_counted_by_key(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    path = tmp_path / "corpus.jsonl"
    records = [{"text": DOCUMENTS[0], "title": "\u4e00 \u4e01"}, {"text": "\u4e02", "title": DOCUMENTS[1]}] * 3
    path.write_text("\n".join(json.dumps(record) for record in records))
    config = PreprocessConfig(json_keys=("text", "title"), append_eod=True)
    results = preprocess([str(path)], tokenizers["wordpiece"], tmp_path / "set", config)
    assert [result.metadata["unknown_tokens"] for result in results] == [3, 6]
    assert [result.metadata["words"] for result in results] == [
        sum(len(record[key].split()) for record in records) for key in ("text", "title")
    ]
    unknown = load_tokenizer(tokenizers["wordpiece"]).unk_id
    for result in results:
        tokens = IndexedDataset(result.prefix).tokens
        assert result.metadata["unknown_tokens"] == (tokens == unknown).sum()


def test_ends_of_documents_are_not_unknown(corpus: Path, tmp_path: Path) -> None:
    train_tokenizer("gpt2", DOCUMENTS[:60], 500, tmp_path / "gpt2")
    dataset = run(corpus, tmp_path / "gpt2", append_eod=True)
    assert dataset.metadata is not None and dataset.metadata["unknown_tokens"] == 0


def test_several_keys_keep_their_documents_side_by_side(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    records = [
        {"title": "one", "text": "Text one."},
        {"title": "", "text": "Text two."},
        {"title": "", "text": ""},
        {"title": "four", "text": ""},
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    config = PreprocessConfig(json_keys=("title", "text"))
    results = preprocess([str(path)], tokenizers["wordpiece"], tmp_path / "set", config)
    assert [Path(result.prefix).name for result in results] == ["set_title_document", "set_text_document"]
    titles, texts = (read_documents(IndexedDataset(result.prefix)) for result in results)
    assert [bool(document) for document in titles] == [True, False, True]
    assert [bool(document) for document in texts] == [True, True, False]


def test_nothing_is_overwritten_unless_told(corpus: Path, tokenizers: dict[str, Path]) -> None:
    before = read_documents(run(corpus, tokenizers["wordpiece"]))
    with pytest.raises(DataError, match="--overwrite"):
        run(corpus, tokenizers["bpe"])
    (corpus.parent / "broken.jsonl").write_text("{")
    prefix = corpus.parent / "out" / "set"
    with pytest.raises(DataError, match="not valid JSON"):
        preprocess([str(corpus.parent / "broken.jsonl")], tokenizers["bpe"], prefix, PreprocessConfig(overwrite=True))
    assert read_documents(IndexedDataset(f"{prefix}_text_document")) == before
    assert read_documents(run(corpus, tokenizers["bpe"], overwrite=True)) != before


def test_no_text_at_all(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="the input holds no text .1 empty documents"):
        run(tmp_path / "corpus.jsonl", tokenizers["wordpiece"])
    assert list((tmp_path / "out").iterdir()) == []


WRAPPED = "The first line of a paragraph goes on\nin a second one, where it ends.\n\n" * 30


@pytest.mark.parametrize(
    ("document", "split_sentences", "told"),
    [
        ("line", False, ["documents of 8 words (median of the first 60), 50% of which do not end like a sentence"]),
        (
            "blank",
            True,
            [
                "documents of 15 words (median of the first 30), 0% of which",
                "100% of the line ends inside documents cut a sentence",
            ],
        ),
        ("file", False, []),
    ],
)
def test_plain_text_that_is_cut_into_pieces_is_a_warning(
    tmp_path: Path, tokenizers: dict[str, Path], caplog: pytest.LogCaptureFixture, document: str,
    split_sentences: bool, told: list[str],
) -> None:  # fmt: skip
    (tmp_path / "corpus.txt").write_text(WRAPPED.replace("\n\n", "\n") if document == "line" else WRAPPED)
    run(tmp_path / "corpus.txt", tokenizers["wordpiece"], document=document, split_sentences=split_sentences)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(told)
    assert all(words in caplog.text for words in told)


def test_short_records_of_json_are_no_warning(
    tmp_path: Path, tokenizers: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "short"}\n' * 30)
    run(tmp_path / "corpus.jsonl", tokenizers["wordpiece"])
    assert not caplog.records


def test_wrong_settings(corpus: Path, tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="--workers 0"):
        run(corpus, tokenizers["wordpiece"], workers=0)
    with pytest.raises(DataError, match="--workers 2000: at most 1,024"):
        run(corpus, tokenizers["wordpiece"], workers=2000)
    with pytest.raises(TokenizerError, match="no such tokenizer folder"):
        run(corpus, tmp_path / "none")

"""Documents to datasets: ids, ends of documents, empty documents, workers, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.errors import DataError, TokenizerError
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents, write_corpus

DOCUMENTS = make_documents(120, seed=7)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer("wordpiece", DOCUMENTS, 500, folder / "wordpiece")
    train_tokenizer("bpe", DOCUMENTS, 500, folder / "bpe")
    train_tokenizer("bpe", DOCUMENTS, 500, folder / "bpe_prefix", add_prefix_space=True)
    return {name: folder / name for name in ("wordpiece", "bpe", "bpe_prefix")}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl", 120, seed=7)
    return tmp_path / "corpus.jsonl"


def _run(corpus: Path, tokenizer: Path, **settings: object) -> IndexedDataset:
    config = PreprocessConfig(**settings)  # type: ignore[arg-type]
    (result,) = preprocess([str(corpus)], tokenizer, corpus.parent / "out" / "set", config)
    return IndexedDataset(result.prefix)


def _read(dataset: IndexedDataset) -> list[list[list[int]]]:
    return [[sequence.tolist() for sequence in dataset.document(i)] for i in range(dataset.num_documents)]


@pytest.mark.parametrize("name", ["wordpiece", "bpe", "bpe_prefix"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("leading_space", [False, True])
def test_ids_equal_the_library_called_directly(
    corpus: Path, tokenizers: dict[str, Path], name: str, split: bool, append_eod: bool, leading_space: bool
) -> None:
    settings = {"split_sentences": split, "append_eod": append_eod, "leading_space": leading_space}
    dataset = _run(corpus, tokenizers[name], **settings)
    backend = Backend.from_file(str(tokenizers[name] / "tokenizer.json"))
    end = [backend.token_to_id("[SEP]" if name == "wordpiece" else "</s>")]
    expected = []
    for document in DOCUMENTS:
        pieces = split_sentences(document) if split else [document]
        if name == "bpe" and leading_space:  # the space before a sentence is part of its first token
            pieces = pieces[:1] + [" " + piece for piece in pieces[1:]]
        ids = [backend.encode(piece, add_special_tokens=False).ids for piece in pieces]
        if append_eod:
            ids[-1] = ids[-1] + end
        expected.append(ids)
    assert _read(dataset) == expected
    assert dataset.metadata is not None
    assert dataset.metadata["sentence_prefix"] == (" " if name == "bpe" and (leading_space or not split) else "")
    assert Path(dataset.prefix).name == f"set_text_{'sentence' if split else 'document'}"


def test_byte_level_sentences_add_up_to_the_paragraph(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    text = "The old river opened. It was quiet! Ada remembered."
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": text}))
    tokenizer = load_tokenizer(tokenizers["bpe"])
    joined = _run(tmp_path / "corpus.jsonl", tokenizers["bpe"], split_sentences=True, leading_space=True)
    assert joined.num_sequences == 3
    assert joined.tokens.tolist() == tokenizer.encode_batch([text])[0]
    alone = _run(tmp_path / "corpus.jsonl", tokenizers["bpe"], split_sentences=True, overwrite=True)
    assert _read(alone) == [tokenizer.encode_batch(split_sentences(text))]


@pytest.mark.parametrize("split", [False, True])
def test_names_of_special_tokens_are_encoded_as_transformers_does(
    tmp_path: Path, tokenizers: dict[str, Path], split: bool
) -> None:
    from transformers import AutoTokenizer

    text = "The old <unk> river </s> opened.<mask> It was <s> quiet"
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": text}))
    dataset = _run(tmp_path / "corpus.jsonl", tokenizers["bpe"], split_special_tokens=split)
    loaded = AutoTokenizer.from_pretrained(tokenizers["bpe"])
    expected = loaded(text, add_special_tokens=False, split_special_tokens=split)
    assert _read(dataset) == [[expected["input_ids"]]]
    assert dataset.metadata is not None and dataset.metadata["split_special_tokens"] is split


def test_metadata(corpus: Path, tokenizers: dict[str, Path]) -> None:
    dataset = _run(corpus, tokenizers["wordpiece"], split_sentences=True, append_eod=True)
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
    assert verify_dataset(dataset)


@pytest.mark.parametrize("split", [False, True])
def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, tokenizers: dict[str, Path], split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxlm_ds.data.sources.reading.CHUNK_BYTES", 5000)
    write_corpus(tmp_path / "corpus.jsonl", 300, seed=8)
    contents = []
    for workers in (1, 2, 3):
        dataset = _run(
            tmp_path / "corpus.jsonl", tokenizers["bpe"], split_sentences=split, workers=workers, overwrite=True
        )
        contents.append([Path(f"{dataset.prefix}.{extension}").read_bytes() for extension in ("bin", "idx", "json")])
    assert contents[0] == contents[1] == contents[2]


def test_empty_documents_are_left_out_and_counted(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    texts = ["", "One here. Two there.", "  \n ", None, "\u0000\u0007", "Three."]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    dataset = _run(path, tokenizers["wordpiece"], split_sentences=True, append_eod=True)
    assert dataset.num_documents == 2 and dataset.num_sequences == 3
    assert dataset.metadata is not None and dataset.metadata["empty_documents"] == 4
    assert [document[-1][-1] for document in _read(dataset)] == [3, 3]


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
    titles, texts = (_read(IndexedDataset(result.prefix)) for result in results)
    assert [bool(document) for document in titles] == [True, False, True]
    assert [bool(document) for document in texts] == [True, True, False]


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_records(tmp_path: Path, tokenizers: dict[str, Path], workers: int) -> None:
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": text}) for text in DOCUMENTS[:5]]
    path.write_text("\n".join([*lines[:2], "{broken", *lines[2:4], '{"text": 1}', lines[4]]))
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 3: not valid JSON.*--max-bad-records"):
        _run(path, tokenizers["wordpiece"], workers=workers)
    with pytest.raises(DataError, match="line 6.*more than the 1 allowed"):
        _run(path, tokenizers["wordpiece"], workers=workers, max_bad_records=1)
    assert list((tmp_path / "out").iterdir()) == []
    dataset = _run(path, tokenizers["wordpiece"], workers=workers, max_bad_records=2)
    assert dataset.num_documents == 5
    assert dataset.metadata is not None and dataset.metadata["bad_records"] == 2


def test_nothing_is_overwritten_unless_told(corpus: Path, tokenizers: dict[str, Path]) -> None:
    before = _read(_run(corpus, tokenizers["wordpiece"]))
    with pytest.raises(DataError, match="--overwrite"):
        _run(corpus, tokenizers["bpe"])
    (corpus.parent / "broken.jsonl").write_text("{")
    prefix = corpus.parent / "out" / "set"
    with pytest.raises(DataError, match="not valid JSON"):
        preprocess([str(corpus.parent / "broken.jsonl")], tokenizers["bpe"], prefix, PreprocessConfig(overwrite=True))
    assert _read(IndexedDataset(f"{prefix}_text_document")) == before
    assert _read(_run(corpus, tokenizers["bpe"], overwrite=True)) != before


def test_no_text_at_all(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="the input holds no text .1 empty documents"):
        _run(tmp_path / "corpus.jsonl", tokenizers["wordpiece"])
    assert list((tmp_path / "out").iterdir()) == []


def test_wrong_settings(corpus: Path, tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="--workers 0"):
        _run(corpus, tokenizers["wordpiece"], workers=0)
    with pytest.raises(DataError, match="--workers 2000: at most 1,024"):
        _run(corpus, tokenizers["wordpiece"], workers=2000)
    with pytest.raises(TokenizerError, match="no such tokenizer folder"):
        _run(corpus, tmp_path / "none")


def test_kept_newlines_reach_a_byte_level_tokenizer(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": "First line.\nSecond line."}))
    plain = _run(path, tokenizers["bpe"], split_sentences=True)
    tokenizer = load_tokenizer(tokenizers["bpe"])
    assert tokenizer.decode(plain.tokens) == "First line.Second line."
    kept = _run(path, tokenizers["bpe"], split_sentences=True, keep_newlines=True, overwrite=True)
    assert "First line.\n" in tokenizer.decode(kept.tokens)


def test_another_tokenizer_is_noticed(corpus: Path, tokenizers: dict[str, Path]) -> None:
    dataset = _run(corpus, tokenizers["wordpiece"])
    with pytest.raises(DataError, match="made with a tokenizer of fingerprint"):
        verify_dataset(dataset, tokenizers["bpe"])

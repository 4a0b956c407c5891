"""What a worker makes of a chunk: the library's ids, spaces before sentences, special tokens by name, line ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.text import write_corpus
from tests.unit.data.conftest import DOCUMENTS
from tests.unit.data.preprocess.test_job import read_documents, run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl", 120, seed=7)
    return tmp_path / "corpus.jsonl"


@pytest.mark.parametrize("name", ["wordpiece", "bpe", "bpe_prefix"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("leading_space", [False, True])
def test_ids_equal_the_library_called_directly(
    corpus: Path, tokenizers: dict[str, Path], name: str, split: bool, append_eod: bool, leading_space: bool
) -> None:
    settings = {"split_sentences": split, "append_eod": append_eod, "leading_space": leading_space}
    dataset = run(corpus, tokenizers[name], **settings)
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
    assert read_documents(dataset) == expected
    assert dataset.metadata is not None
    assert dataset.metadata["sentence_prefix"] == (" " if name == "bpe" and (leading_space or not split) else "")
    assert Path(dataset.prefix).name == f"set_text_{'sentence' if split else 'document'}"


@pytest.mark.parametrize("append_eod", [False, True])
def test_a_token_of_its_own_begins_each_document(corpus: Path, tokenizers: dict[str, Path], append_eod: bool) -> None:
    settings = {"split_sentences": True, "append_eod": append_eod}
    plain = read_documents(run(corpus, tokenizers["bpe"], **settings))
    dataset = run(corpus, tokenizers["bpe"], prepend_bos=True, overwrite=True, **settings)
    begin = load_tokenizer(tokenizers["bpe"]).token_to_id("<s>")
    assert read_documents(dataset) == [[[begin, *document[0]], *document[1:]] for document in plain]
    assert verify_dataset(dataset)[-1].startswith("text: 61 of 61 sampled sequences")


def test_byte_level_sentences_add_up_to_the_paragraph(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    text = "The old river opened. It was quiet! Ada remembered."
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": text}))
    tokenizer = load_tokenizer(tokenizers["bpe"])
    joined = run(tmp_path / "corpus.jsonl", tokenizers["bpe"], split_sentences=True, leading_space=True)
    assert joined.num_sequences == 3
    assert joined.tokens.tolist() == tokenizer.encode_batch([text])[0]
    alone = run(tmp_path / "corpus.jsonl", tokenizers["bpe"], split_sentences=True, overwrite=True)
    assert read_documents(alone) == [tokenizer.encode_batch(split_sentences(text))]


@pytest.mark.parametrize("split", [False, True])
def test_names_of_special_tokens_are_encoded_as_transformers_does(
    tmp_path: Path, tokenizers: dict[str, Path], split: bool
) -> None:
    from transformers import AutoTokenizer

    text = "The old <unk> river </s> opened.<mask> It was <s> quiet"
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": text}))
    dataset = run(tmp_path / "corpus.jsonl", tokenizers["bpe"], split_special_tokens=split)
    loaded = AutoTokenizer.from_pretrained(tokenizers["bpe"])
    expected = loaded(text, add_special_tokens=False, split_special_tokens=split)
    assert read_documents(dataset) == [[expected["input_ids"]]]
    assert dataset.metadata is not None and dataset.metadata["split_special_tokens"] is split


def test_kept_newlines_reach_a_byte_level_tokenizer(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": "First line.\nSecond line."}))
    plain = run(path, tokenizers["bpe"], split_sentences=True)
    tokenizer = load_tokenizer(tokenizers["bpe"])
    assert tokenizer.decode(plain.tokens) == "First line.Second line."
    kept = run(path, tokenizers["bpe"], split_sentences=True, keep_newlines=True, overwrite=True)
    assert "First line.\n" in tokenizer.decode(kept.tokens)

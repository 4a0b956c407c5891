"""RoBERTa's rows equal fairseq's, token by token, from text to the samples that training reads.

Sources (github.com/facebookresearch/fairseq):
- examples/roberta/multiprocessing_bpe_encoder.py: each line is stripped and encoded by itself; --keep-empty keeps the
  empty lines between documents (examples/roberta/README.pretraining.md).
- fairseq/binarizer.py, fairseq/data/dictionary.py: every line, an empty one too, gets </s> at its end (append_eos).
- fairseq/tasks/masked_lm.py: blocks of tokens_per_sample - 1, <s> in front of each.
- fairseq/data/token_block_utils_fast.pyx: which lines a block has, by break mode.
- fairseq/trainer.py: a block longer than the model's positions is left out of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from ctxlm_ds.data.index.index import SampleIndex
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.real_text import docstrings
from tests.sample_data import FakeTokenizer, build_sample_index, random_documents, run_config, sample_of, write_dataset

Line = list[int]
SEPARATOR_LINE = 1
"""Length of an empty line: its </s>."""


def binarized(documents: Sequence[Sequence[str]], encode: Callable[[str], Line], eos: int) -> list[Line]:
    """One line per sentence, an empty line between documents."""
    lines: list[Line] = []
    for number, document in enumerate(documents):
        if number:
            lines.append([eos])
        lines += [[*encode(sentence.strip()), eos] for sentence in document]
    return lines


def blocks(lines: Sequence[Line], size: int, mode: str) -> list[Line]:
    """The blocks of at most `size` tokens in which training sees the lines; one line may be longer."""
    stream = [token for line in lines for token in line]
    if mode == "none":
        return [stream[begin : begin + size] for begin in range(0, len(stream), size)]
    within_documents = mode == "complete_doc"
    found: list[list[Line]] = [[]]
    for line in lines:
        ends_document = within_documents and len(line) == SEPARATOR_LINE
        if ends_document or (found[-1] and sum(map(len, found[-1])) + len(line) > size):
            found.append([])
        if not ends_document:
            found[-1].append(line)
    joined = [[token for line in block for token in line] for block in found]
    return [block for block in joined if len(block) > int(within_documents)]


def fairseq_rows(
    documents: Sequence[Sequence[str]], encode: Callable[[str], Line], bos: int, eos: int, length: int, mode: str
) -> list[Line]:
    """Every block behind <s>; those longer than `length` - 1 are still there."""
    return [[bos, *block] for block in blocks(binarized(documents, encode, eos), length - 1, mode)]


def cut(row: Line, length: int) -> list[Line]:
    """Our rows instead of one that is too long for training: it is cut, and <s> put in front of each part."""
    bos, *block = row
    starts = accumulate([0] * bool(block) + [length - 1] * ((len(block) - 1) // (length - 1)))
    return [[bos, *block[start : start + length - 1]] for start in starts]


pytestmark = pytest.mark.long

NUM_TEXTS = 60
MODES = {"full_sentences": "complete", "doc_sentences": "complete_doc"}
FAKE = FakeTokenizer()
CLS, SEP = FAKE.cls_id, FAKE.sep_id


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text (docstrings of the standard library), a tokenizer and datasets of it in every encoding."""
    folder = tmp_path_factory.mktemp("real")
    texts = docstrings(NUM_TEXTS)
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    train_tokenizer("bpe", texts, 1000, folder / "tokenizer")
    for name, split, space in (("alone", True, False), ("joined", True, True), ("whole", False, False)):
        config = PreprocessConfig(split_sentences=split, leading_space=space)
        preprocess([str(folder / "text.jsonl")], folder / "tokenizer", folder / name, config)
    return folder


def config_of(sample_format: str, seq_length: int, **data: Any) -> Any:
    return run_config(data={"sample_format": sample_format, "seq_length": seq_length, **data})


def real_rows(corpus: Path, name: str, config: Any) -> list[list[int]]:
    return rows_of(build_sample_index(corpus / name, load_tokenizer(corpus / "tokenizer"), config))


def rows_of(index: SampleIndex) -> list[list[int]]:
    return [sample_of(index, number).input_ids.tolist() for number in range(len(index))]


def expected_rows(documents: Any, encode: Any, ids: tuple[int, int], length: int, mode: str) -> list[list[int]]:
    """fairseq's rows; one that its training leaves out for its length is cut, one without text left out."""
    found = fairseq_rows(documents, encode, *ids, length, mode)
    parts = [part for row in found for part in cut(row, length)]
    return [part for part in parts if set(part) - set(ids)]


def fake_rows(documents: Any, length: int, mode: str) -> list[list[int]]:
    """The same for documents of ids: a sentence is encoded already, and its tokens stand for its text."""
    texts = [[" ".join(map(str, sentence)) for sentence in document] for document in documents]
    return expected_rows(texts, lambda text: [int(word) for word in text.split()], (CLS, SEP), length, mode)


@pytest.mark.parametrize("sample_format", MODES)
@pytest.mark.parametrize("length", [64, 128, 512])
def test_rows_of_real_text_are_fairseqs(corpus: Path, sample_format: str, length: int) -> None:
    backend = Backend.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (corpus / "text.jsonl").read_text(encoding="utf-8").splitlines()]
    ids = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    expected = expected_rows(
        [split_sentences(text) for text in texts],
        lambda line: backend.encode(line, add_special_tokens=False).ids, ids, length, MODES[sample_format],
    )  # fmt: skip
    found = real_rows(corpus, "alone_text_sentence", config_of(sample_format, length))
    assert found == expected
    has_pair = [any(pair == (ids[1], ids[1]) for pair in zip(row, row[1:], strict=False)) for row in found]
    assert any(has_pair) == (sample_format == "full_sentences")
    assert np.mean([row.count(ids[1]) for row in found]) > 1.2


@pytest.mark.parametrize("sample_format", MODES)
@pytest.mark.parametrize("length", [4, 9, 16, 40, 127])
@pytest.mark.parametrize("eod_id", [None, SEP])
def test_rows_of_invented_documents_are_fairseqs(
    tmp_path: Path, sample_format: str, length: int, eod_id: int | None
) -> None:
    """Short rows: document separators at the start and end of rows, and many sentences longer than a row."""
    documents = random_documents(60, sentences=4, tokens=12, seed=length)
    prefix = write_dataset(tmp_path / "d", documents, eod_id=eod_id)
    index = build_sample_index(prefix, FAKE, config_of(sample_format, length))
    assert rows_of(index) == fake_rows(documents, length, MODES[sample_format])
    for number in range(len(index)):
        sample = sample_of(index, number)
        assert sample.special_mask.tolist() == [token in (CLS, SEP) for token in sample.input_ids]


@pytest.mark.parametrize("length", [5, 16, 61])
def test_documents_that_are_not_split_are_a_stream(tmp_path: Path, length: int) -> None:
    """fairseq's break mode `none`, each document being a line."""
    documents = [[sum(document, [])] for document in random_documents(40, sentences=3, tokens=9, seed=length)]
    prefix = write_dataset(tmp_path / "d", documents, split_sentences=False)
    index = build_sample_index(prefix, FAKE, config_of("full_sentences", length))
    assert rows_of(index) == fake_rows(documents, length, "none")


@pytest.mark.parametrize("sample_format", MODES)
def test_an_encoding_that_does_not_fit_the_rows_is_reported(corpus: Path, sample_format: str) -> None:
    with pytest.raises(DataError, match=r"encoded with the space .* again without --leading-space"):
        real_rows(corpus, "joined_text_sentence", config_of(sample_format, 64))
    with pytest.raises(DataError, match=r"encoded without the space .* again with --leading-space"):
        real_rows(corpus, "alone_text_sentence", config_of(sample_format, 64, separate_sentences=False))
    assert real_rows(corpus, "joined_text_sentence", config_of(sample_format, 64, separate_sentences=False))
    for is_separate in (True, False):
        assert real_rows(corpus, "whole_text_document", config_of(sample_format, 64, separate_sentences=is_separate))


def test_pairs_of_segments_join_sentences(corpus: Path) -> None:
    with pytest.raises(DataError, match="data.sample_format segment_pair joins sentences"):
        real_rows(corpus, "alone_text_sentence", config_of("segment_pair", 64))
    assert real_rows(corpus, "joined_text_sentence", config_of("segment_pair", 64))
    assert real_rows(corpus, "alone_text_sentence", config_of("sentence_pair", 64))

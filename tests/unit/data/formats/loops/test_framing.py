"""From records to token ids: special tokens in their places, and every range and token checked."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import build_objective
from tests.sample_data import (
    FakeTokenizer,
    build_sample_index,
    numbered_documents,
    random_documents,
    run_config,
    sample_of,
    write_dataset,
)
from tests.unit.data.index.test_index import (
    BERT,
    CLS,
    FORMATS,
    SEP,
    TOKENIZER,
    config_of,
    config_of_rows,
    damaged_indexes,
    ids_of,
)

ROBERTA = FakeTokenizer(double_separator=True)


def test_pairs_are_framed_for_both_families(tmp_path: Path) -> None:
    documents = numbered_documents([[3, 4], [2, 5]])
    prefix = write_dataset(tmp_path / "d", documents)
    for tokenizer, middle in ((BERT, [SEP]), (ROBERTA, [SEP, SEP])):
        index = build_sample_index(prefix, tokenizer, config_of("segment_pair"))
        for number in range(len(index.records)):
            sample = sample_of(index, number)
            record = index.records[number]
            ids = sample.input_ids.tolist()
            a = list(range(5 + record["a_start"], 5 + record["a_end"]))
            b = list(range(5 + record["b_start"], 5 + record["b_end"]))
            assert ids == [CLS, *a, *middle, *b, SEP]
            assert len(ids) == record["num_tokens"]
            assert sample.token_type_ids.tolist() == [0] * (len(a) + 2) + [1] * (len(middle) - 1 + len(b) + 1)
            assert sample.special_mask.tolist() == [token in (CLS, SEP) for token in ids]
            assert sample.sequence_label in (0, 1)
        shutil.rmtree(index.directory)


def test_dense_full_sentences_have_separators_between_documents(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", numbered_documents([[3], [2, 2], [4]]))
    index = build_sample_index(prefix, ROBERTA, config_of("full_sentences", 12, separate_sentences=False))
    assert ids_of(index) == [[CLS, 5, 6, 7, SEP, 8, 9, 10, 11, SEP], [CLS, 12, 13, 14, 15, SEP]]
    sample = sample_of(index, 0)
    assert np.flatnonzero(sample.special_mask).tolist() == [0, 4, 9]
    assert sample.token_type_ids.sum() == 0 and sample.sequence_label == NO_LABEL


@pytest.mark.parametrize("sample_format", FORMATS)
def test_a_damaged_index_is_named_and_never_read_beyond_the_dataset(tmp_path: Path, sample_format: str) -> None:
    """Every field of a record overwritten: an error, or a sample that is what the record now says."""
    prefix = write_dataset(tmp_path / "d", random_documents(20), eod_id=TOKENIZER.sep_id)
    index = build_sample_index(prefix, TOKENIZER, config_of_rows(sample_format))
    tokens, refused = IndexedDataset(prefix).tokens, 0
    used = index.records.dtype.names if index.format.makes_pairs else ("a_start", "a_end", "num_tokens")
    for opened in damaged_indexes(index, TOKENIZER, 3, used, (-1, -(2**62), 2**62, 2**31 - 1, 127, 0, 1)):
        try:
            sample = sample_of(opened, 3)
        except DataError as error:
            assert "sample 3 of its index does not fit the dataset" in str(error)
            refused += 1
        else:
            text = sample.input_ids[~sample.special_mask]
            a_start, a_end, b_start, b_end = opened.records[3].tolist()[:4]
            again = np.concatenate([tokens[a_start:a_end], tokens[b_start:b_end]])
            assert np.array_equal(text, again[again != TOKENIZER.sep_id] if sample_format != "blocks" else again)
    assert refused >= 8


@pytest.mark.parametrize("token", [1000, 65_535, -1, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, token: int) -> None:
    documents = random_documents(20)
    documents[7][0][0] = token
    config = run_config(data={"sample_format": "full_sentences"}, objective={"whole_word": True})
    objective = build_objective(config.objective, TOKENIZER)
    rows = build_rows([write_dataset(tmp_path / "d", documents)], TOKENIZER, config.row_settings)
    with pytest.raises(DataError, match=r"does not fit the dataset, whose tokens are below 1000; .* --verify"):
        for _, _ in zip(
            range(1 + len(rows) // 8), TrainLoader(rows, objective, config.data, config.training), strict=False
        ):
            pass

"""ELECTRA's rows against a transcription of the original: every row, the special tokens, token types and shares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.errors import ConfigError, DataError
from tests.sample_data import FakeTokenizer, build_sample_index, random_documents, sample_of, write_dataset
from tests.unit.data.formats.electra_reference import ExampleBuilder
from tests.unit.data.formats.pairs import KernelDraws
from tests.unit.data.index.test_index import BERT, CLS, SEP, config_of, damaged_indexes

FORMAT = "doc_segments"


@pytest.mark.parametrize("seq_length", [5, 16, 64, 512])
@pytest.mark.parametrize("shares", [(0.05, 0.1), (1.0, 0.0), (0.5, 1.0)])
def test_same_draws_give_the_originals_rows(tmp_path: Path, seq_length: int, shares: tuple[float, float]) -> None:
    """The original's rules, fed with the kernel's own draws, give every row: ids, special tokens and token types."""
    documents = random_documents(60, sentences=15, tokens=12, seed=seq_length)
    config = config_of(FORMAT, seq_length, short_seq_prob=shares[0], one_segment_prob=shares[1], num_duplicates=2)
    index = build_sample_index(write_dataset(tmp_path / "d", documents, eod_id=SEP), BERT, config)
    expected = []
    for duplicate in range(2):
        for number, document in enumerate(documents):
            draws = KernelDraws(config.training.seed, FORMAT, duplicate, number)
            expected += ExampleBuilder(seq_length, draws, *shares).examples(document)
    assert len(index.records) == len(expected)
    for number, (first, second) in enumerate(expected):
        sample, ids = sample_of(index, number), [CLS, *first, SEP]
        types = [0] * len(ids) + ([1] * (len(second) + 1) if second else [])
        ids += [*second, SEP] if second else []
        assert sample.input_ids.tolist() == ids and len(ids) <= seq_length
        assert sample.token_type_ids.tolist() == types and sample.sequence_label == NO_LABEL
        assert sample.special_mask.tolist() == [token in (CLS, SEP) for token in ids]


def test_roberta_has_two_separators_between_segments(tmp_path: Path) -> None:
    tokenizer = FakeTokenizer(double_separator=True)
    index = build_sample_index(write_dataset(tmp_path / "d", random_documents(20)), tokenizer, config_of(FORMAT, 32))
    divided = 0
    for number, record in enumerate(index.records):
        sample, first = sample_of(index, number), int(record["b_start"])
        assert len(sample.input_ids) == record["num_tokens"] <= 32
        ends = np.flatnonzero(sample.input_ids == SEP).tolist()
        divided += len(ends) == 3
        assert ends in ([first + 1], [first + 1, first + 2, len(sample.input_ids) - 1])
    assert divided > 20


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(20), eod_id=SEP)
    index = build_sample_index(prefix, BERT, config_of(FORMAT, 64))
    assert index.records["b_start"][3] + 2 < index.records["num_tokens"][3]
    fields, values = ("a_start", "a_end", "b_start", "num_tokens"), (-1, -(2**62), 2**62, 2**31 - 1, 0, 1)
    for opened in damaged_indexes(index, BERT, 3, fields, values):
        with pytest.raises(DataError, match="sample 3 of its index does not fit the dataset"):
            sample_of(opened, 3)


def test_rows_need_sentences_and_room(tmp_path: Path) -> None:
    documents = random_documents(5)
    unsplit = write_dataset(tmp_path / "unsplit", documents, split_sentences=False)
    with pytest.raises(DataError, match="--split-sentences, or use doc_sentences"):
        build_sample_index(unsplit, BERT, config_of(FORMAT))
    with pytest.raises(ConfigError, match=r"seq_length 4 leaves 1 tokens next to 3 special"):
        build_sample_index(write_dataset(tmp_path / "d", documents), BERT, config_of(FORMAT, 4))

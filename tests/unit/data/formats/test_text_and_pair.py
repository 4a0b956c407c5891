"""XLNet's rows: continued text, two segments and their special tokens, forward and backward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.index.record import SourcePart
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.schema import RunConfig
from tests.sample_data import (
    FakeTokenizer,
    build_sample_index,
    numbered_documents,
    random_documents,
    run_config,
    sample_of,
    write_dataset,
)
from tests.unit.data.index.test_index import damaged_indexes

TOKENIZER = FakeTokenizer(vocab_size=100_000)
CLS, SEP, EOD = TOKENIZER.cls_id, TOKENIZER.sep_id, 7


def config_of(seq_length: int = 32, **data: object) -> RunConfig:
    return run_config(
        data={"sample_format": "text_and_pair", "seq_length": seq_length} | data, model={"family": "xlnet"},
        objective={"name": "permutation_lm"},
    )  # fmt: skip


@pytest.mark.parametrize("seq_length", [32, 33])
def test_rows_continue_each_other_and_hold_two_segments(tmp_path: Path, seq_length: int) -> None:
    shape = np.random.default_rng(1).integers(1, 9, size=(40, 6)).tolist()
    documents = numbered_documents(shape)
    prefix = write_dataset(tmp_path / "d", documents, eod_id=EOD)
    index = build_sample_index(prefix, TOKENIZER, config_of(seq_length, both_directions=True))
    text = [token for document in documents for token in [*sum(document, []), EOD]]
    half = seq_length // 2
    labels = [sample_of(index, number).sequence_label for number in range(len(index))]
    assert labels == sorted(labels) and 0.4 < np.mean(labels) < 0.6
    for direction in (0, 1):
        first = labels.index(direction)
        stream = text[::-1] if direction else text
        for number in range(first, first + labels.count(direction)):
            sample = sample_of(index, number)
            ids, begin = sample.input_ids.tolist(), (number - first) * half
            end = half + int((sample.token_type_ids == 0).sum()) - half - 1
            assert len(ids) == seq_length and ids[:half] == stream[begin : begin + half]
            assert ids[half:end] == stream[begin + half : begin + end] and end > half
            assert [ids[end], *ids[-2:]] == [SEP, SEP, CLS]
            second = ids[end + 1 : -2]
            assert second and any(stream[place : place + len(second)] == second for place in range(len(stream)))
            assert np.flatnonzero(sample.special_mask).tolist() == [end, seq_length - 2, seq_length - 1]


def test_passes_draw_other_segments(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(40))
    index = build_sample_index(prefix, TOKENIZER, config_of(num_duplicates=2))
    one, two = np.split(index.records, 2)
    assert (one["a_start"] == two["a_start"]).all() and (one["b_start"] != two["b_start"]).mean() > 0.5


def test_a_part_of_the_documents_is_read_alone(tmp_path: Path) -> None:
    documents = random_documents(40)
    prefix = write_dataset(tmp_path / "d", documents)
    index = build_sample_index(SourcePart(str(prefix), (10, 30)), TOKENIZER, config_of())
    first, after = (sum(len(sentence) for document in documents[:end] for sentence in document) for end in (10, 30))
    for name, before in (("a_start", 16), ("b_start", 0)):
        assert (index.records[name] - before >= first).all() and (index.records[name] < after).all()


def test_too_little_text_and_too_short_rows_are_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", numbered_documents([[9, 9]]))
    with pytest.raises(DataError, match=r"18 tokens of text are not more than a row of data\.seq_length 32 has"):
        build_sample_index(prefix, TOKENIZER, config_of())
    prefix = write_dataset(tmp_path / "whole", random_documents(40), split_sentences=False)
    with pytest.raises(DataError, match=r"text_and_pair needs sentences, .*; preprocess it again with --split"):
        build_sample_index(prefix, TOKENIZER, config_of())
    with pytest.raises(ConfigError, match=r"data\.seq_length: 9 leaves no room for two segments"):
        check_config(config_of(9), None)


@pytest.mark.long
def test_damaged_records_are_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(40))
    index = build_sample_index(prefix, TOKENIZER, config_of(both_directions=True))
    fields = ("a_start", "a_end", "b_start", "b_end", "num_tokens")
    for number in (3, len(index) - 1):
        for opened in damaged_indexes(index, TOKENIZER, number, fields, (-1, -(2**62), 2**62, 0)):
            with pytest.raises(DataError, match=f"sample {number} of its index does not fit the dataset"):
                sample_of(opened, number)

"""Chunks hold every token of the documents once, in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.data.index.record import SourcePart
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.schema import RunConfig
from tests.sample_data import (
    FakeTokenizer,
    build_sample_index,
    numbered_documents,
    run_config,
    sample_of,
    write_dataset,
)

TOKENIZER = FakeTokenizer()


def config_of(size: int) -> RunConfig:
    return run_config(
        data={"sample_format": "chunks", "seq_length": size}, objective={"name": "masked_lm"},
        model={"family": "roberta"},
    )  # fmt: skip


@pytest.mark.parametrize("split_sentences", [False, True])
@pytest.mark.parametrize("at_once", [1, 3, 1 << 16])
def test_documents_follow_each_other_without_a_separator(
    tmp_path: Path, split_sentences: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxlm_ds.data.index.record.RECORDS_AT_ONCE", at_once)
    documents = numbered_documents([[3, 4], [20], [1], [9, 9, 2]])
    prefix = write_dataset(tmp_path / "data", documents, split_sentences)
    index = build_sample_index(prefix, TOKENIZER, config_of(10))
    samples = [sample_of(index, number) for number in range(len(index))]
    assert [len(sample.input_ids) for sample in samples] == [10, 10, 10, 10, 8]
    assert [token for sample in samples for token in sample.input_ids.tolist()] == list(range(5, 53))
    assert not any(sample.special_mask.any() for sample in samples)
    assert index.meta["documents"] == 4


def test_a_part_of_the_documents_is_cut_alone(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "data", numbered_documents([[7], [12], [5], [30]]))
    index = build_sample_index(SourcePart(str(prefix), (1, 3)), TOKENIZER, config_of(10))
    tokens = [token for number in range(len(index)) for token in sample_of(index, number).input_ids.tolist()]
    assert tokens == list(range(12, 29))


def test_a_dataset_without_text_is_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "data", [[[]]])
    with pytest.raises(DataError, match="no text"):
        build_sample_index(prefix, TOKENIZER, config_of(10))

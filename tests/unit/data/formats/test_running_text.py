"""Rows of full sentences as a format: ends of documents, documents that are not split."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sample_data import build_sample_index, numbered_documents, random_documents, write_dataset
from tests.unit.data.index.test_index import BERT, SEP, config_of, ids_of


@pytest.mark.parametrize("sample_format", ["full_sentences", "doc_sentences"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("eod_id", [SEP, 999])
def test_end_of_document_tokens_are_never_doubled(tmp_path: Path, sample_format: str, split: bool, eod_id: int) -> None:
    documents = random_documents(30, sentences=5, tokens=12, seed=1, vocab_size=900)
    config = config_of(sample_format, 32)
    plain = build_sample_index(write_dataset(tmp_path / "plain", documents, split), BERT, config)
    ended = build_sample_index(write_dataset(tmp_path / "ended", documents, split, eod_id=eod_id), BERT, config)
    assert ids_of(ended) == ids_of(plain)


def test_unsplit_documents_are_cut_at_block_borders(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", numbered_documents([[25], [10]]), split_sentences=False)
    index = build_sample_index(prefix, BERT, config_of("full_sentences", 12, separate_sentences=False))
    text = [[token for token in ids[1:-1]] for ids in ids_of(index)]
    assert [len(part) for part in text] == [10, 10, 10, 6]
    assert sum(text, []) == [*range(5, 30), SEP, *range(30, 40)]

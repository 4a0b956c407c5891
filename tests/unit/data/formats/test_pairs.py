"""Pairs as a format: ends of documents, datasets that have no pairs, and other pairs in every pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.errors import DataError
from tests.sample_data import build_sample_index, random_documents, write_dataset
from tests.unit.data.index.test_index import BERT, SEP, config_of, forget_record, ids_of


def test_end_of_document_tokens_of_pairs(tmp_path: Path) -> None:
    documents = random_documents(30, seed=1)
    plain = build_sample_index(write_dataset(tmp_path / "plain", documents), BERT, config_of("segment_pair"))
    ended = build_sample_index(write_dataset(tmp_path / "e", documents, eod_id=SEP), BERT, config_of("segment_pair"))
    assert ids_of(ended) == ids_of(plain)


@pytest.mark.parametrize("sample_format", ["segment_pair", "sentence_pair"])
def test_pairs_need_sentences_and_two_documents(tmp_path: Path, sample_format: str) -> None:
    documents = random_documents(5)
    unsplit = write_dataset(tmp_path / "unsplit", documents, split_sentences=False)
    with pytest.raises(DataError, match="--split-sentences"):
        build_sample_index(unsplit, BERT, config_of(sample_format))
    forget_record(unsplit)
    with pytest.raises(DataError, match="--split-sentences"):
        build_sample_index(unsplit, BERT, config_of(sample_format))
    with pytest.raises(DataError, match="there is only 1"):
        build_sample_index(write_dataset(tmp_path / "one", documents[:1]), BERT, config_of(sample_format))
    assert not list(tmp_path.glob("*.samples-*"))


def test_every_pass_draws_other_pairs(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(60))
    for sample_format in ("segment_pair", "sentence_pair"):
        one = build_sample_index(prefix, BERT, config_of(sample_format))
        two = build_sample_index(prefix, BERT, config_of(sample_format, num_duplicates=2))
        passes = ids_of(two)[: len(one.records)], ids_of(two)[len(one.records) :]
        assert passes[0] == ids_of(one)
        shared = {tuple(ids) for ids in passes[0]} & {tuple(ids) for ids in passes[1]}
        assert len(shared) < 0.6 * len(one.records)


@pytest.mark.parametrize("share", [0.0, 1 / 6, 1.0])
def test_the_share_of_random_next_segments(tmp_path: Path, share: float) -> None:
    """A document's last sentence alone has a random one in any case."""
    prefix = write_dataset(tmp_path / "d", random_documents(400))
    plain = build_sample_index(prefix, BERT, config_of("segment_pair"))
    index = build_sample_index(prefix, BERT, config_of("segment_pair", random_next_prob=share))
    assert "random_next_prob" not in plain.meta["settings"]  # indexes that exist keep their names
    lone = build_sample_index(prefix, BERT, config_of("segment_pair", random_next_prob=0.0)).records["is_random"].mean()
    found, wanted = index.records["is_random"].mean(), lone + (1 - lone) * share
    assert abs(found - wanted) < 0.05 and (share < 1.0 or found == 1.0)

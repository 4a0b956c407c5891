"""What every format refuses, and the empty documents and sentences that none of them sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.data.formats.pairs import SegmentPair
from ctxlm_ds.data.index.record import sample_settings
from ctxlm_ds.errors import ConfigError, DataError
from tests.sample_data import FakeTokenizer, build_sample_index, random_documents, write_dataset
from tests.unit.data.index.test_index import BERT, config_of, ids_of


def test_short_sequences_empty_data_and_foreign_tokenizers_are_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(5))
    with pytest.raises(ConfigError, match=r"seq_length 4 leaves 1 tokens next to 3 special"):
        build_sample_index(prefix, BERT, config_of("segment_pair", 4))
    with pytest.raises(DataError, match="made with another tokenizer"):
        build_sample_index(prefix, FakeTokenizer(fingerprint="other"), config_of("segment_pair"))
    empty = write_dataset(tmp_path / "empty", [[], []])
    with pytest.raises(DataError, match="no text"):
        build_sample_index(empty, BERT, config_of("full_sentences"))


@pytest.mark.parametrize("role", ["framing", "chooser"])
def test_a_loop_that_cannot_be_imported_is_told_before_data_is_read(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentPair, role, "no_such_package:loop")
    with pytest.raises(
        ConfigError, match=rf"the {role} of data.sample_format segment_pair \(no_such_package:loop\)"
    ):
        sample_settings(config_of("segment_pair").row_settings)


def test_empty_documents_and_sentences_vanish(tmp_path: Path) -> None:
    documents = random_documents(20, sentences=4, seed=3)
    with_holes = [[]] + [document[:1] + [[]] + document[1:] for document in documents] + [[]]
    for sample_format in ("segment_pair", "full_sentences"):
        config = config_of(sample_format)
        full = build_sample_index(write_dataset(tmp_path / f"f-{sample_format}", documents), BERT, config)
        holes = build_sample_index(write_dataset(tmp_path / f"h-{sample_format}", with_holes), BERT, config)
        assert ids_of(holes) == ids_of(full)

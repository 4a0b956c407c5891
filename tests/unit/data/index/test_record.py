"""The settings that decide the contents of a sample index, and no other, are in its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.data.index.record import SourcePart, sample_settings
from ctxlm_ds.errors import DataError
from tests.sample_data import build_sample_index, random_documents, run_config, write_dataset
from tests.unit.data.index.test_index import BERT
from tests.unit.data.index.test_sentence_table import TOKENIZER


def test_key_covers_every_setting_and_nothing_else(tmp_path: Path) -> None:
    documents = random_documents(20)
    prefix = write_dataset(tmp_path / "d", documents)
    base = {"sample_format": "segment_pair"}
    changed = [
        run_config(data=base),
        run_config(data=base | {"seq_length": 32}),
        run_config(data=base | {"short_seq_prob": 0.2}),
        run_config(data=base | {"num_duplicates": 2}),
        run_config(data=base | {"packing": True}),
        run_config(data=base | {"packing": True, "max_sequences_per_row": 3}),
        run_config(data=base, training={"seed": 8}),
        run_config(data={"sample_format": "full_sentences"}),
    ]
    folders = {build_sample_index(prefix, BERT, config).directory for config in changed}
    assert len(folders) == len(changed)
    same = run_config(data=base | {"num_workers": 3}, training={"micro_batch_size": 1}, objective={"mask_prob": 0.3})
    assert build_sample_index(prefix, BERT, same).directory in folders
    write_dataset(tmp_path / "other", random_documents(20, seed=1))
    other = build_sample_index(tmp_path / "other", BERT, changed[0]).directory.name
    assert other.split("-")[-1] not in {folder.name.split("-")[-1] for folder in folders}


def test_indexes_of_stored_masks_keep_their_names() -> None:
    """A setting that came later names an index only if it is not what every mask had before."""
    static = {"name": "masked_lm", "masking": "static", "whole_word": True}
    settings = sample_settings(run_config(objective=static).row_settings).static_masking
    assert settings is not None and not {"word_starts", "z_loss"} & settings.keys()
    assert {"mask_prob", "special_tokens", "boundary_weight", "max_predictions"} <= settings.keys()
    albert = sample_settings(run_config(objective=static | {"word_starts": "albert"}).row_settings).static_masking
    assert albert == settings | {"word_starts": "albert"}


def test_held_out_index_does_not_depend_on_seed_or_passes(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(20))
    one = run_config(training={"seed": 1}, data={"num_duplicates": 3}, objective={"masking": "static"})
    other = run_config(training={"seed": 2})
    first = build_sample_index(prefix, BERT, one, held_out=True)
    assert first.directory == build_sample_index(prefix, BERT, other, held_out=True).directory
    assert not first.is_static


def test_parts_have_indexes_of_their_own_and_must_exist(tmp_path: Path) -> None:
    prefix = str(write_dataset(tmp_path / "d", random_documents(30, seed=1)))
    config = run_config(data={"sample_format": "doc_sentences"})
    parts = [SourcePart(prefix), SourcePart(prefix, (0, 30)), SourcePart(prefix, (0, 29)), SourcePart(prefix, (1, 30))]
    whole, same, *others = (build_sample_index(part, TOKENIZER, config) for part in parts)
    assert whole.directory == same.directory == build_sample_index(prefix, TOKENIZER, config).directory
    assert len({index.directory for index in (whole, *others)}) == 3
    assert len({index.random_key for index in (whole, *others)}) == 3
    for documents in ((0, 31), (-1, 3), (5, 4)):
        with pytest.raises(DataError, match=rf"documents {documents[0]} to {documents[1]} are asked for, it has 30"):
            build_sample_index(SourcePart(prefix, documents), TOKENIZER, config)

"""Static masking: the masked copies on disk are those of the objective, and damaged ones are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.index.build import IndexPlace, build_rows
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.objectives.base import build_objective
from tests.sample_data import (
    build_sample_index,
    example_of,
    locate,
    random_documents,
    run_config,
    sample_of,
    samples_of_row,
    write_dataset,
)
from tests.unit.data.index.test_index import BERT
from tests.unit.data.index.test_index_rows import TOKENIZER


@pytest.mark.parametrize("packing", [False, True])
def test_static_masking_stores_each_copy(tmp_path: Path, packing: bool) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(40, sentences=4))
    config = run_config(
        data={"num_duplicates": 3, "packing": packing}, objective={"masking": "static", "whole_word": True}
    )
    objective = build_objective(config.objective, BERT)
    with pytest.raises(ConfigError, match="needs the objective"):
        build_sample_index(prefix, BERT, config)
    index = build_sample_index(prefix, BERT, config, objective)
    single = build_sample_index(prefix, BERT, run_config(data={"packing": packing}))
    assert abs(len(index.records) / len(single.records) - 3) < 0.5
    masks = set()
    for row in range(len(index)):
        for number in samples_of_row(index, row):
            sample, example = sample_of(index, number), example_of(index, number)
            restored = example.input_ids.copy()
            restored[example.prediction_positions] = example.prediction_labels
            assert np.array_equal(restored, sample.input_ids)
            assert np.array_equal(example.token_type_ids, sample.token_type_ids)
            assert example.sequence_label == sample.sequence_label
            assert len(example.prediction_positions) >= 1
            masks.add((len(sample.input_ids), tuple(example.prediction_positions.tolist())))
    assert len(masks) > 0.5 * len(index.records)
    again = IndexPlace.of(prefix, BERT, config.row_settings).open(BERT)
    assert np.array_equal(example_of(again, 5).input_ids, example_of(index, 5).input_ids)


def test_static_masks_differ_between_samples_of_one_length(tmp_path: Path) -> None:
    documents = [[list(range(5, 35)), list(range(5, 36))] for _ in range(100)]
    prefix = write_dataset(tmp_path / "d", documents)
    config = run_config(data={"sample_format": "sentence_pair"}, objective={"masking": "static"})
    index = build_sample_index(prefix, BERT, config, build_objective(config.objective, BERT))
    examples = [example_of(index, number) for number in range(len(index.records))]
    for length in {len(example.input_ids) for example in examples}:
        masks = [tuple(e.prediction_positions.tolist()) for e in examples if len(e.input_ids) == length]
        assert len(set(masks)) == len(masks)


def test_static_copies_of_several_sources(tmp_path: Path) -> None:
    config = run_config(objective={"masking": "static"}, data={"packing": True})
    prefixes = [write_dataset(tmp_path / name, random_documents(9, seed=ord(name))) for name in "ab"]
    rows = build_rows(prefixes, TOKENIZER, config.row_settings, build_objective(config.objective, TOKENIZER))
    wanted = np.random.default_rng(0).permutation(len(rows))
    examples, row_starts = rows.examples(wanted)
    for place, row in enumerate(wanted.tolist()):
        index, local = locate(rows, row)
        for slot, number in zip(
            range(row_starts[place], row_starts[place + 1]), samples_of_row(index, local), strict=True
        ):
            ours, alone = examples.example(slot), example_of(index, number)
            for name in ("input_ids", "token_type_ids", "prediction_positions", "prediction_labels"):
                assert np.array_equal(getattr(ours, name), getattr(alone, name)), name
            assert ours.sequence_label == alone.sequence_label


@pytest.mark.parametrize(
    "name", ["masked_ids", "masked_offsets", "prediction_positions", "prediction_labels", "prediction_offsets"]
)
def test_damaged_masked_copies_are_named(tmp_path: Path, name: str) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(20))
    config = run_config(objective={"masking": "static"})
    index = build_sample_index(prefix, TOKENIZER, config, build_objective(config.objective, TOKENIZER))
    values = np.lib.format.open_memmap(index.directory / f"{name}.npy", mode="r+")
    values[:] = np.iinfo(values.dtype).max
    del values
    with pytest.raises(DataError, match=r"the masked copy of sample 5 is damaged; delete the folder"):
        example_of(IndexPlace.of(prefix, TOKENIZER, config.row_settings).open(TOKENIZER), 5)

"""Short documents in rows: every way has the same documents' lengths, and rows are what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.load import load_config
from tools.benchmark.documents import (
    LONGEST,
    MEAN_LENGTH,
    NUM_STEPS,
    SHORTEST,
    dataset_lengths,
    document_steps,
    drawn_lengths,
)
from tools.benchmark.packing import PACKED, WAYS, recipe_for
from tools.benchmark.steps import measured_recipe

CASE = measured_recipe(load_config("bert-tiny", ["training.micro_batch_size=2"]), 0.0, "fp32", 2)


def test_lengths() -> None:
    lengths = drawn_lengths(100_000, seed=1)
    assert abs(lengths.mean() - MEAN_LENGTH) < 2
    assert (lengths.min(), lengths.max()) == (SHORTEST, LONGEST)
    assert np.array_equal(lengths[:9], drawn_lengths(100_000, seed=1)[:9])


def test_lengths_of_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document is all of its sentences."""
    sentences = np.array([10, 30, 25, 2, 90, 90])

    class Dataset:
        document_indices = np.array([0, 2, 3, 4, 6])

        def __init__(self, prefix: str) -> None:
            assert prefix == "made up"

        def __len__(self) -> int:
            return len(sentences)

        def lengths(self, first: int, after: int) -> NDArray[np.int64]:
            return sentences[first:after]

    monkeypatch.setattr("ctxlm_ds.data.dataset.reader.IndexedDataset", Dataset)
    assert set(dataset_lengths("made up", 200, seed=5)) == {40, 25, SHORTEST, LONGEST}


def test_rows_of_each_way() -> None:
    lengths = drawn_lengths(1000, seed=2)
    shapes = {}
    for way in WAYS:
        case = recipe_for(CASE, way)
        check_config(case, 1)
        assert case.data.shares_rows == (way == PACKED)
        steps = document_steps(case, build_objective(case.objective), lengths, way == WAYS[3])
        assert len(steps) == NUM_STEPS
        batches = [batch for step in steps for batch in step.micro_batches]
        assert len(batches) == 2 * NUM_STEPS
        assert all(step.rows_consumed == case.training.global_batch_size for step in steps)
        assert all(step.num_tokens == sum(batch.num_tokens for batch in step.micro_batches) for step in steps)
        shapes[way] = [tuple(batch.fields["input_ids"].shape) for batch in batches]
        most = max(int(batch.fields["sequence_ids"].max()) for batch in batches)
        assert (most > 4) == (way == PACKED) and (most == 1) == (way != PACKED)
        share = sum(batch.num_tokens for batch in batches) / sum(rows * length for rows, length in shapes[way])
        assert share > 0.95 if way == PACKED else share < 0.65
    assert set(shapes[PACKED]) == set(shapes[WAYS[1]]) == {(2, 512)}
    assert set(shapes[WAYS[2]]) == {(8, 128)}
    assert all(rows == 8 and length <= 128 for rows, length in shapes[WAYS[3]])
    assert len(set(shapes[WAYS[3]])) > 1


def test_a_micro_batch_ends_with_its_longest_document() -> None:
    case = recipe_for(CASE, WAYS[3])
    steps = document_steps(case, build_objective(case.objective), drawn_lengths(500, seed=3), longest_of_batch=True)
    for batch in steps[0].micro_batches:
        assert bool((batch.fields["sequence_ids"][:, -1] > 0).any())


def test_predictions_are_a_share_of_each_document() -> None:
    case = recipe_for(CASE, PACKED)
    (step, *_) = document_steps(case, build_objective(case.objective), drawn_lengths(500, seed=4), False)
    assert 0.11 < step.counts["masked_lm"] / step.num_tokens < 0.16
    fields = step.micro_batches[0].fields
    at = torch.gather(fields["sequence_ids"], 1, fields["prediction_positions"])
    assert bool((at[fields["masked_lm_labels"] >= 0] > 0).all())

"""Micro-batches of one constant shape."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import NO_LABEL, Example
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.objectives.masked_lm import MaskedLM
from tests.ragged import Rows, collate
from tests.sample_data import FakeTokenizer
from tests.sections import data_section, objective_section


def masked_lm(slots: int | None = None, pad_id: int = 0, **settings: object) -> MaskedLM:
    """An objective of BERT unless another name is given."""
    section = objective_section(max_predictions=slots, **settings)
    built = build_objective(section, FakeTokenizer(pad_id=pad_id))
    assert isinstance(built, MaskedLM)
    return built


def example(length: int, predictions: list[int], is_random: int = 0, first_id: int = 10) -> Example:
    ids = np.arange(first_id, first_id + length)
    types = np.repeat([0, 1], [length // 2, length - length // 2])
    return Example(ids, types, np.array(predictions, dtype=np.int64), np.array(predictions) + 500, is_random)


def test_one_sequence_a_row() -> None:
    batch = collate([[example(5, [1, 3], is_random=1)], [example(8, [2])]], masked_lm(3, pad_id=9), Rows(8))
    assert batch.fields["input_ids"].tolist() == [[10, 11, 12, 13, 14, 9, 9, 9], list(range(10, 18))]
    assert batch.fields["token_type_ids"].tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
    assert batch.fields["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 0, 0], list(range(8))]
    assert batch.fields["sequence_ids"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8]
    assert batch.fields["sequence_starts"].tolist() == [[0, 5], [0, 8]]
    assert batch.fields["prediction_positions"].tolist() == [[1, 3, 0], [2, 0, 0]]
    assert batch.fields["cls_positions"].tolist() == [[0], [0]]
    assert batch.fields["masked_lm_labels"].tolist() == [[501, 503, IGNORE_LABEL], [502, IGNORE_LABEL, IGNORE_LABEL]]
    assert batch.fields["next_sentence_labels"].tolist() == [[1], [0]]


def test_packed_rows_restart_positions_and_an_empty_row_is_padding() -> None:
    rows = [[example(3, [1]), example(4, [0, 2], is_random=1, first_id=30)], [], [example(10, [9], NO_LABEL)]]
    batch = collate(rows, masked_lm(4), Rows(10, 3))
    assert batch.fields["input_ids"][0].tolist() == [10, 11, 12, 30, 31, 32, 33, 0, 0, 0]
    assert batch.fields["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0, 0]
    assert batch.fields["sequence_ids"][0].tolist() == [1, 1, 1, 2, 2, 2, 2, 0, 0, 0]
    assert batch.fields["sequence_starts"].tolist() == [[0, 3, 7, 10], [0, 10, 10, 10], [0, 10, 10, 10]]
    assert batch.fields["prediction_positions"][0].tolist() == [1, 3, 5, 0]
    assert batch.fields["masked_lm_labels"][0].tolist() == [501, 500, 502, IGNORE_LABEL]
    ignored = [IGNORE_LABEL] * 3
    assert batch.fields["next_sentence_labels"].tolist() == [[0, 1, IGNORE_LABEL], ignored, ignored]
    assert batch.fields["cls_positions"].tolist() == [[0, 3, 0], [0, 0, 0], [0, 0, 0]]
    assert batch.fields["sequence_ids"][1].sum() == 0 and (batch.fields["masked_lm_labels"][1] == IGNORE_LABEL).all()


def test_shapes_are_constant_contiguous_and_int64() -> None:
    import torch

    objective = masked_lm(5, name="masked_lm")
    for rows in ([[example(4, [1])]] * 3, [[], [], [example(8, []), example(8, [1, 2])]]):
        batch = collate(rows, objective, Rows(16, 2))
        sizes = {name: tuple(tensor.shape) for name, tensor in batch.fields.items()}
        tokens = ("input_ids", "token_type_ids", "position_ids", "sequence_ids")
        slots = ("prediction_positions", "masked_lm_labels")
        wanted = dict.fromkeys(tokens, (3, 16)) | dict.fromkeys(slots, (3, 5)) | {"sequence_starts": (3, 3)}
        assert sizes == wanted
        assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batch.fields.values())


@pytest.mark.parametrize(("data", "slots"), [({}, 20), ({"packing": True}, 27), ({"seq_length": 512}, 77)])
def test_default_slots(data: dict[str, object], slots: int) -> None:
    assert masked_lm().slots(data_section(**data)) == slots


@pytest.mark.parametrize("rounding", ["nearest", "probabilistic"])
def test_default_slots_are_always_enough(rounding: str) -> None:
    """Any partition of any row: each sequence predicts less than p·n + 1."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        seq_length, most = int(rng.integers(8, 200)), int(rng.integers(1, 9))
        data = data_section(seq_length=seq_length, packing=most > 1, max_sequences_per_row=most)
        objective = masked_lm(mask_prob=float(rng.uniform(0.01, 0.5)))
        cuts = np.sort(rng.integers(0, seq_length + 1, size=most - 1))
        lengths = np.diff([0, *cuts, seq_length])
        lengths = lengths[lengths > 0]
        expected = objective.config.mask_prob * lengths
        counts = np.maximum(1, np.rint(expected) if rounding == "nearest" else np.floor(expected + 1 - 1e-12))
        counts = np.minimum(counts, objective.budgets(lengths, data))
        assert counts.sum() <= objective.slots(data)


def test_given_slots_are_never_exceeded_in_packed_rows() -> None:
    rng = np.random.default_rng(1)
    data = data_section(seq_length=128, packing=True, max_sequences_per_row=8)
    objective = masked_lm(12)
    for _ in range(300):
        lengths = np.diff([0, *np.sort(rng.choice(np.arange(1, 128), size=7, replace=False)), 128])
        budgets = objective.budgets(lengths, data)
        assert budgets.min() >= 1 and budgets.sum() <= 12
    alone = data_section(seq_length=128)
    assert objective.budgets(np.array([5, 128]), alone).tolist() == [12, 12]


@pytest.mark.parametrize(
    "row", [[example(9, [1])], [example(2, [1])] * 3, [example(8, [1, 2, 3, 4])], [example(4, [0, 1]), example(5, [0])]]
)
def test_a_row_that_does_not_fit_is_refused(row: list[Example]) -> None:
    """Compiled loops have no bounds of their own: nothing may be written beyond the row."""
    fits = [example(8, [1, 2, 3])]
    with pytest.raises(DataError, match=r"row 1 of a micro-batch does not fit .*input_ids 8, .*_positions 3,"):
        collate([fits, row], masked_lm(3), Rows(8, 2))

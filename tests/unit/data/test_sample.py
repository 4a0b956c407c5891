"""Made-up batches of declared fields, and batches with no more places than they need."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL, Field
from ctxlm_ds.data.sample import Batch, needed_places
from ctxlm_ds.kernels.attention import cumulative_lengths


def test_made_up_rows_are_one_full_sequence_each() -> None:
    whole = partial(Field, shared="complete")
    fields = [
        whole("input_ids", 6, 3), whole("position_ids", 6), whole("sequence_ids", 6), whole("sequence_starts", 3, 6),
        whole("prediction_positions", 2), whole("masked_lm_labels", 2, IGNORE_LABEL),
        whole("decoder_labels", 9, IGNORE_LABEL), whole("decoder_input_ids", 9),
        whole("weight", 1, 0.0, "float32"), whole("cls_positions", 1),
    ]  # fmt: skip
    batch = Batch.example(fields, 4, np.random.default_rng(0), 50)
    assert {name: tuple(value.shape) for name, value in batch.fields.items()} == {
        field.name: (4, field.columns) for field in fields
    }
    assert batch.num_tokens == 24
    assert batch.fields["input_ids"].max() < 50 and batch.fields["weight"].dtype == torch.float32
    assert batch.fields["position_ids"].tolist() == [list(range(6))] * 4
    assert batch.fields["sequence_starts"].tolist() == [[0, 6, 6]] * 4
    slots = batch.fields["prediction_positions"]
    assert (slots[:, 0] < slots[:, 1]).all() and slots.max() < 6
    assert set(batch.fields["masked_lm_labels"].flatten().tolist()) <= {0, 1}
    assert set(batch.fields["decoder_labels"].flatten().tolist()) == {0, 1}
    assert batch.fields["decoder_input_ids"].max() > 1


def test_rows_have_no_more_places_for_sequences_than_they_need() -> None:
    """The bounds of the sequences stay; a row of three and its padding keeps five columns of nine."""
    starts = torch.full((3, 9), 6)
    starts[:, 0], starts[1, 1:4] = 0, torch.tensor([2, 3, 5])
    ids = torch.ones(3, 6, dtype=torch.long)
    batch = placed({"sequence_ids": ids, "sequence_starts": starts, "decoder_sequence_ids": ids[:, :4],
                    "decoder_sequence_starts": starts.clamp(max=4)})  # fmt: skip
    found = batch.narrowed()
    for name, length in (("sequence_starts", 6), ("decoder_sequence_starts", 4)):
        assert found[name].shape == (3, 5)
        every, needed = (set(cumulative_lengths(x[name], length).tolist()) for x in (batch.fields, found))
        assert every == needed
    assert found["sequence_ids"] is ids
    alone = placed({"sequence_ids": ids[:1], "sequence_starts": starts[:1]})
    assert alone.narrowed()["sequence_starts"].shape == (1, 2)
    assert placed({"input_ids": ids}).narrowed() == {"input_ids": ids}


def test_places_of_rows_on_a_device_are_known_without_reading_it() -> None:
    """A GPU's tensors have no values on the host."""
    fields = {"sequence_ids": torch.ones(2, 6, dtype=torch.long), "sequence_starts": torch.tensor([[0, *[6] * 8]] * 2)}
    places = placed(fields).places
    there = Batch({name: tensor.to("meta") for name, tensor in fields.items()}, places)
    assert places == 2 and there.narrowed()["sequence_starts"].shape == (2, 2)


def placed(fields: dict[str, torch.Tensor]) -> Batch:
    return Batch(fields, needed_places({name: tensor.numpy() for name, tensor in fields.items()}))

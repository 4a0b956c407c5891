"""Identical inputs are computed once, in batches, and the output layer sees the chosen places only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from ctxlm_ds.apps.downstream.language_model import LanguageModel, Row, load_model
from tests.downstream_models import write_bert

ROWS = [
    Row((2, 5, 4, 7, 3), (), (2,), (9,)), Row((2, 5, 4, 7, 3), (), (2,), (8,)), Row((2, 4, 3), (), (1,), (6,)),
    Row((2, 4, 4, 7, 9, 9, 3), (), (1, 2), (5, 6)), Row((2, 5, 4, 7, 3), (), (3,), (9,)),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(write_bert(tmp_path_factory.mktemp("model")), AutoModelForMaskedLM)


class Watched(LanguageModel):
    """Notes the shape of each batch, and of what the output layer reads."""

    def watch(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        batches: list[tuple[int, ...]] = []
        read: list[tuple[int, ...]] = []
        hook = lambda _, given: read.append(tuple(given[0].shape[:-1]))  # noqa: E731
        handle = self.model.get_output_embeddings().register_forward_hook(lambda layer, given, _: hook(layer, given))
        encoder = self.model.base_model.register_forward_hook(
            lambda _, given, result: batches.append(tuple(result[0].shape[:2]))
        )
        found = self.log_probs(ROWS)
        handle.remove()
        encoder.remove()
        self.found = found
        return batches, read


@pytest.mark.parametrize("batch_tokens", [1, 20, 2048])
def test_places_are_computed_once(model: Any, batch_tokens: int) -> None:
    watched = Watched(model, 0, batch_tokens)
    batches, read = watched.watch()
    assert sum(rows for rows, _ in batches) == 4  # of five, two have the same input and place
    assert sum(places for _, places in read) == 5 and {one for one, _ in read} == {1}
    assert all(rows == 1 or rows * length <= batch_tokens for rows, length in batches)
    assert (len(batches) == 1) == (batch_tokens == 2048)
    for row, values in zip(ROWS, watched.found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([row.input_ids])).logits[0].double().log_softmax(-1)
        wanted = [float(logits[place, target]) for place, target in zip(row.places, row.targets, strict=True)]
        assert values.dtype == np.float64
        np.testing.assert_allclose(values, wanted, rtol=1e-5)

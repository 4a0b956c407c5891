"""Choices of layers: their forms, what they compute, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.features.options import LayerChoice
from ctxlm_ds.errors import ConfigError

LAYERS = np.random.default_rng(1).normal(size=(5, 3, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", LAYERS[:1]),
        ("-2", LAYERS[3:4]),
        ("all", LAYERS),
        ("sum:2", (LAYERS[3] + LAYERS[4])[None]),
        ("mean:4", ((LAYERS[1] + LAYERS[2] + LAYERS[3] + LAYERS[4]) / 4)[None]),
        ("mean:all", LAYERS.mean(axis=0)[None]),
        ("concat:2", np.concatenate([LAYERS[3], LAYERS[4]], axis=1)[None]),
        ("mix:3", LAYERS[2:]),
        ("mix:all", LAYERS),
    ],
)
def test_a_choice_is_read_and_selected(text: str, expected: np.ndarray) -> None:
    choice = LayerChoice.parse(text)
    assert str(choice) == text
    choice.check(5, "model")
    found = choice.select(LAYERS)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert choice.shape(5, 4) == (found.shape[0], found.shape[2])


@pytest.mark.parametrize("text", ["", "last", "sum", "sum:0", "mean:x", "max:2", "1.5"])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a layer"):
        LayerChoice.parse(text)


@pytest.mark.parametrize("text", ["5", "-6", "concat:6"])
def test_a_layer_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--layers {text}: model has 5 layers, 0 \(embeddings\) to 4"):
        LayerChoice.parse(text).check(5, "model")

"""Models that cannot be built from a family: impossible shapes and outputs are refused."""

from __future__ import annotations

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.models.program import build_program
from tests.encoder_batches import tiny_model
from tests.unit.models.test_layers_sequence import build_of


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny_model(vocab_size=None), r"model\.vocab_size is not set"),
        (tiny_model(vocab_size=10, hidden_size=30, num_attention_heads=4), "4 does not divide model.hidden_size 30"),
    ],
)
def test_impossible_shapes(config: TransformerSection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_program(config, build_of())


def test_an_output_that_the_family_cannot_compute() -> None:
    with pytest.raises(ConfigError, match="model.family bert cannot compute logits"):
        build_program(tiny_model(), build_of(("logits",)))

"""Models built from a family: their parameters' names; impossible shapes and outputs are refused."""

from __future__ import annotations

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.models.program import build_program
from tests.encoder_batches import tiny_model
from tests.unit.models.test_layers_sequence import BOTH, build_of, model_of

ONE = ("predicted_logits",)


def names_of_layer(index: int) -> set[str]:
    parts = ("attention.qkv", "attention.output", "attention_layer_norm", "mlp.up", "mlp.down", "mlp_layer_norm")
    return {f"encoder.{index}.{part}.{leaf}" for part in parts for leaf in ("weight", "bias")}


COMMON_NAMES = {
    "word_embeddings.weight", "embeddings.position_embeddings.weight", "embeddings.layer_norm.weight",
    "embeddings.layer_norm.bias", "heads.mlm_transform.weight", "heads.mlm_transform.bias",
    "heads.mlm_layer_norm.weight", "heads.mlm_layer_norm.bias", "mlm_bias.bias",
    *names_of_layer(0), *names_of_layer(1),
}  # fmt: skip
NSP_NAMES = {f"heads.{part}.{leaf}" for part in ("pooler", "nsp_classifier") for leaf in ("weight", "bias")}


@pytest.mark.parametrize(
    ("config", "outputs", "names"),
    [
        (tiny_model(), BOTH, COMMON_NAMES | NSP_NAMES | {"embeddings.token_type_embeddings.weight"}),
        (tiny_model(), ONE, COMMON_NAMES | {"embeddings.token_type_embeddings.weight"}),
        (tiny_model(family="roberta"), ONE, COMMON_NAMES),
        (
            tiny_model(family="roberta", pre_layer_norm=True),
            ONE,
            COMMON_NAMES | {"final_layer_norm.weight", "final_layer_norm.bias"},
        ),
    ],
)
def test_parameter_names(config: TransformerSection, outputs: tuple[str, ...], names: set[str]) -> None:
    assert {name for name, _ in model_of(config, outputs).named_parameters()} == names


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

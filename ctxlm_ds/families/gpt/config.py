"""Settings of GPT (Radford 2018) and GPT-2 (Radford 2019)."""

from __future__ import annotations

from typing import Any

from ctxlm_ds.families.base import Family, TransformerSection
from ctxlm_ds.recipe.section import PositiveFloat


class GptSection(TransformerSection):
    """A decoder: each position sees earlier ones only and predicts the next token."""

    position_initializer_range: PositiveFloat | None = None
    """Standard deviation of the initial position table (GPT-2's released code: 0.01); null is initializer_range."""


class Gpt1Section(GptSection):
    """GPT: a decoder with LayerNorm after attention and feed-forward."""

    family: str = "gpt1"


class Gpt2Section(GptSection):
    """GPT-2: a decoder with LayerNorm before attention and feed-forward, and after the last layer."""

    family: str = "gpt2"


def _tiny(family: str) -> dict[str, Any]:
    return {
        "model": {
            "family": family, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "intermediate_size": 128,
            "max_position_embeddings": 64, "layer_norm_eps": 1e-5, "hidden_activation": "gelu_tanh",
        },
        "objective": {"name": "causal_lm"},
        "data": {"sample_format": "blocks", "seq_length": 32},
    }  # fmt: skip


def tiny_gpt1() -> dict[str, Any]:
    """Return the sections of a recipe of GPT small enough for tests."""
    return _tiny("gpt1")


def tiny_gpt2() -> dict[str, Any]:
    """Return the sections of a recipe of GPT-2 small enough for tests."""
    return _tiny("gpt2")


GPT1 = Family(
    name="gpt1",
    title="GPT (Radford 2018)",
    section=Gpt1Section,
    layers="ctxlm_ds.families.gpt.layers:gpt1_layers",
    export="ctxlm_ds.families.gpt.export:GPT1_EXPORT",
    outputs=frozenset({"logits"}),
    objective="causal_lm",
    sample_format="blocks",
    tokenizer="gpt2",
    tiny=tiny_gpt1,
    vocab_size=40_478,
)
GPT2 = Family(
    name="gpt2",
    title="GPT-2 (Radford 2019)",
    section=Gpt2Section,
    layers="ctxlm_ds.families.gpt.layers:gpt2_layers",
    export="ctxlm_ds.families.gpt.export:GPT2_EXPORT",
    outputs=frozenset({"logits"}),
    objective="causal_lm",
    sample_format="blocks",
    tokenizer="gpt2",
    tiny=tiny_gpt2,
    vocab_size=50_257,
)

"""Settings of GPT (Radford 2018) and GPT-2 (Radford 2019)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ctxlm_ds.families.base import Family, PreNormSection, TransformerSection, tiny_transformer
from ctxlm_ds.recipe.sections import PositiveFloat


class GptSection(TransformerSection):
    """A decoder: each position sees earlier ones only and predicts the next token."""

    pre_layer_norm: ClassVar[bool] = False

    position_initializer_range: PositiveFloat | None = None
    """Standard deviation of the initial position table (GPT-2's released code: 0.01); null is initializer_range."""


class Gpt1Section(GptSection):
    """GPT: a decoder with LayerNorm after attention and feed-forward."""

    family: str = "gpt1"


class Gpt2Section(GptSection, PreNormSection):
    """GPT-2: a decoder with LayerNorm before attention and feed-forward, and after the last layer."""

    pre_layer_norm: ClassVar[bool] = True

    family: str = "gpt2"


def _tiny(family: str) -> dict[str, Any]:
    return tiny_transformer(
        family, "causal_lm", "blocks",
        intermediate_size=128, layer_norm_eps=1e-5, hidden_activation="gelu_tanh",
    )  # fmt: skip


GPT1 = Family(
    name="gpt1",
    title="GPT (Radford 2018)",
    section=Gpt1Section,
    layers="ctxlm_ds.families.gpt.layers:gpt_layers",
    export="ctxlm_ds.families.gpt.export:GPT1_EXPORT",
    outputs=frozenset({"logits"}),
    objective="causal_lm",
    sample_format="blocks",
    tokenizer="gpt1",
    tiny=lambda: _tiny("gpt1"),
    vocab_size=40_478,
)
GPT2 = replace(
    GPT1,
    name="gpt2",
    title="GPT-2 (Radford 2019)",
    section=Gpt2Section,
    export="ctxlm_ds.families.gpt.export:GPT2_EXPORT",
    tokenizer="gpt2",
    tiny=lambda: _tiny("gpt2"),
    vocab_size=50_257,
)

"""Settings of LLaMA (Touvron 2023, arXiv:2302.13971), Llama 2 (arXiv:2307.09288) and Llama 3 (arXiv:2407.21783)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ctxlm_ds.families.base import (
    Family,
    PreNormSection,
    RotaryBase,
    nearest_divisor,
    rotary_problems,
    tiny_transformer,
)
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import PositiveFraction, Probability, SmallInt, Width

Turns = Annotated[float, Field(gt=0.0, le=1e6)]
_LLAMA3_ONLY = ("rotary_low_turns", "rotary_high_turns", "rotary_original_length")


class LlamaSection(PreNormSection):
    """LLaMA: a decoder with RMSNorm before each block, rotary positions, gated feed-forward layers, and no biases."""

    learned_positions: ClassVar[bool] = False
    shared_heads: ClassVar[str | None] = "num_key_value_heads"
    # Rotary settings are not compared: a longer context begins from the weights of a shorter one.
    same_function: ClassVar[tuple[str, ...]] = (*PreNormSection.same_function, "tie_word_embeddings")

    family: str = "llama"
    num_key_value_heads: SmallInt | None = None
    """Heads of keys and values, each shared by a group of query heads (Llama 2 70B and Llama 3: 8); null for one per
    query head."""
    intermediate_size: Width = 2048
    """Width of the feed-forward layer after the gate; the matrix before it has twice as many outputs."""
    max_position_embeddings: Width = 2048
    """Longest sequence; there is no position table, so it may be raised for trained weights."""
    hidden_activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"  # type: ignore[assignment]
    """Activation of the gate; with `silu` the layer is SwiGLU (Shazeer 2020)."""
    layer_norm_eps: PositiveFraction = 1e-5
    """Epsilon of every RMSNorm (LLaMA 1e-6, Llama 2 and 3 1e-5)."""
    hidden_dropout: Probability = 0.0
    """Dropout on the output of attention and feed-forward; none as published, and none on the embeddings."""
    attention_dropout: Probability = 0.0
    """Dropout on attention probabilities; none as published."""
    tie_word_embeddings: bool = False
    """The output matrix is the word table (Llama 3.2 1B and 3B)."""
    rotary_base: RotaryBase = 10_000.0
    """Base of the rotary positions (LLaMA and Llama 2 10,000, Llama 3 500,000)."""
    rotary_scaling: Literal["none", "linear", "llama3"] = "none"
    """Slower rotations for rows longer than those of the first training. `linear`: all by the factor (Chen 2023).
    `llama3`: by the factor where a pair of elements turns seldom (Llama 3.1)."""
    rotary_scaling_factor: Annotated[float, Field(ge=1.0, le=1e6)] = 1.0
    """Factor of `linear` and `llama3` (Llama 3.1 8, Llama 3.2 32)."""
    rotary_low_turns: Turns = 1.0
    """`llama3`: pairs with fewer turns in the original length are slowed by the full factor."""
    rotary_high_turns: Turns = 4.0
    """`llama3`: pairs with more turns in the original length keep their speed."""
    rotary_original_length: Width = 8192
    """`llama3`: longest row of the first training."""

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def idle_settings(self) -> tuple[str, ...]:
        factor = ("rotary_scaling_factor",) if self.rotary_scaling == "none" else ()
        return factor if self.rotary_scaling == "llama3" else (*factor, *_LLAMA3_ONLY)

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        heads, shared = self.num_attention_heads, self.key_value_heads
        if heads % shared:
            text = (
                f"{shared} does not divide model.num_attention_heads {heads}, but each head of keys and values serves "
                f"as many query heads; {nearest_divisor(heads, shared)} does"
            )
            yield Problem("model.num_key_value_heads", text, ("model.num_attention_heads",))
        yield from rotary_problems(self)
        if self.rotary_scaling == "llama3" and self.rotary_low_turns >= self.rotary_high_turns:
            text = (
                f"{self.rotary_low_turns} is not below model.rotary_high_turns {self.rotary_high_turns}; Llama 3.1 has "
                "1 and 4"
            )
            yield Problem("model.rotary_low_turns", text, ("model.rotary_high_turns",))


LLAMA = Family(
    name="llama",
    title="LLaMA (Touvron 2023)",
    section=LlamaSection,
    layers="ctxlm_ds.families.llama.layers:llama_layers",
    export="ctxlm_ds.families.llama.export:EXPORT",
    outputs=frozenset({"logits"}),
    objective="causal_lm",
    sample_format="blocks",
    tokenizer="gpt2",
    tiny=lambda: tiny_transformer(
        "llama", "causal_lm", "blocks",
        num_key_value_heads=2, intermediate_size=48, layer_norm_eps=1e-5, initializer_range=0.1,
        rotary_scaling="llama3", rotary_scaling_factor=4.0, rotary_original_length=16,
    ),
    vocab_size=32_000,
)  # fmt: skip

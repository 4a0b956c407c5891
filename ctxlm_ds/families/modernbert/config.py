"""ModernBERT's settings (Warner 2024, arXiv:2412.13663)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from ctxlm_ds.families.base import Family, PreNormSection, RotaryBase, rotary_problems, tiny_transformer
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import PositiveFraction, Probability, SmallInt, Width


class ModernBertSection(PreNormSection):
    """ModernBERT: an encoder with rotary positions, gated feed-forward layers, local attention, and no biases."""

    learned_positions: ClassVar[bool] = False
    output_norm: ClassVar[str] = "heads.mlm_layer_norm"
    hidden_matrices: ClassVar[tuple[str, ...]] = ("heads.mlm_transform.weight",)
    # global_rotary_base is not compared: a longer context begins from the weights of a smaller base.
    same_function: ClassVar[tuple[str, ...]] = (
        *PreNormSection.same_function, "global_attention_every", "local_attention", "local_rotary_base",
    )  # fmt: skip

    family: str = "modernbert"
    num_layers: SmallInt = 22
    """Number of transformer layers."""
    intermediate_size: Width = 1152
    """Width of the feed-forward layer after the gate; the matrix before it has twice as many outputs."""
    max_position_embeddings: Width = 8192
    """Longest sequence; there is no position table, so it may be raised for trained weights."""
    layer_norm_eps: PositiveFraction = 1e-5
    """Epsilon of every LayerNorm."""
    hidden_dropout: Probability = 0.1
    """Dropout on the output of attention; embeddings and feed-forward layers have none, as published."""
    attention_dropout: Probability = 0.0
    """Dropout on attention probabilities."""
    initializer: Literal["normal", "truncated_normal"] = "truncated_normal"
    """Distribution of the initial weights; `truncated_normal` has none beyond two deviations, as published."""
    global_attention_every: SmallInt = 3
    """Layer 0 and each layer at a multiple of this see the complete sequence; the others are local."""
    local_attention: Width = 128
    """Window of the local layers: half of these positions to each side, and the position itself."""
    global_rotary_base: RotaryBase = 160_000.0
    """Base of the rotary positions of global layers (10,000 for rows of 1,024 positions, 160,000 for 8,192)."""
    local_rotary_base: RotaryBase = 10_000.0
    """Base of the rotary positions of local layers."""

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return ("local_attention", "local_rotary_base") if self.global_attention_every == 1 else ()

    def is_global(self, layer: int) -> bool:
        """Return True if layer number `layer` sees the complete sequence."""
        return layer % self.global_attention_every == 0

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.local_attention % 2:
            yield Problem(
                "model.local_attention",
                f"{self.local_attention} is odd, but half of the window is on each side; set it to "
                f"{self.local_attention + 1}",
            )
        yield from rotary_problems(self)


def _tiny() -> dict[str, Any]:
    sections = tiny_transformer(
        "modernbert", "masked_lm", "doc_sentences",
        intermediate_size=48, layer_norm_eps=1e-5, initializer_range=0.13, local_attention=8,
    )  # fmt: skip
    sections["objective"]["mask_prob"] = 0.3
    sections["data"]["packing"] = True
    return sections


MODERNBERT = Family(
    name="modernbert",
    title="ModernBERT (Warner 2024)",
    section=ModernBertSection,
    layers="ctxlm_ds.families.modernbert.layers:modernbert_layers",
    export="ctxlm_ds.families.modernbert.export:EXPORT",
    outputs=frozenset({"predicted_logits"}),
    objective="masked_lm",
    sample_format="doc_sentences",
    tokenizer="bpe",
    tiny=_tiny,
    vocab_size=50_368,
)

"""UniLM's settings (Dong 2019)."""

from __future__ import annotations

from collections.abc import Iterator

from ctxlm_ds.families.base import Family, tiny_transformer
from ctxlm_ds.families.bert.config import BertSection
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import PositiveFraction, SmallInt

TOKEN_TYPES = 6
"""Two for pairs read in both directions, one for each direction, two for a source and a target."""


class UnilmSection(BertSection):
    """UniLM: BERT whose rows say which positions a position sees."""

    family: str = "unilm"
    type_vocab_size: SmallInt = TOKEN_TYPES
    """Number of token types, which differ by the kind of language model."""
    layer_norm_eps: PositiveFraction = 1e-5
    """Epsilon of every LayerNorm."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.type_vocab_size != TOKEN_TYPES:
            text = f"{self.type_vocab_size}: the kinds of language models have {TOKEN_TYPES} token types; leave it out"
            yield Problem("model.type_vocab_size", text, ("model.family",))


def _tiny() -> dict[str, dict[str, object]]:
    tiny = tiny_transformer("unilm", "unified_lm", "segment_pair")
    # Most rows of short texts have one sentence and a random second one.
    shares = {"sequence_to_sequence_prob": 0.2, "left_to_right_prob": 0.25}
    return tiny | {"data": tiny["data"] | {"random_next_prob": 0.0}, "objective": tiny["objective"] | shares}


UNILM = Family(
    name="unilm",
    title="UniLM (Dong 2019)",
    section=UnilmSection,
    layers="ctxlm_ds.families.unilm.layers:unilm_layers",
    export="ctxlm_ds.families.unilm.export:EXPORT",
    outputs=frozenset({"ranked_logits", "sentence_logits"}),
    objective="unified_lm",
    sample_format="segment_pair",
    tokenizer="wordpiece",
    tiny=_tiny,
    vocab_size=28_996,
)

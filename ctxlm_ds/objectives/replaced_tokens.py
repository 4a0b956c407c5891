"""Replaced token detection (ELECTRA): a generator fills masks, a discriminator finds the tokens that it got wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ctxlm_ds.objectives.base import BINARY_SUMS, LossTerm, count_positions
from ctxlm_ds.objectives.masked_lm import MaskedLM, MaskedLMSection
from ctxlm_ds.recipe.sections import NonNegativeFloat, Probability

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer


class ReplacedTokensSection(MaskedLMSection):
    """Masked tokens by a generator, and by a discriminator whether each token is one of its wrong samples (ELECTRA)."""

    name: str = "replaced_tokens"
    keep_prob: Probability = 0.15
    """Share of the predicted tokens left as they are in the generator's input (ELECTRA 0.15)."""
    random_prob: Probability = 0.0
    """Share of the predicted tokens replaced by a random one; the rest becomes the mask token (ELECTRA 0)."""
    generator_weight: NonNegativeFloat = 1.0
    """Weight of the generator's loss."""
    discriminator_weight: NonNegativeFloat = 50.0
    """Weight of the discriminator's loss."""


GENERATOR = LossTerm("generator", ("generator_logits",), ("masked_lm_labels",))
DISCRIMINATOR = LossTerm(
    "discriminator", ("replaced_logits",), ("replaced_labels",), BINARY_SUMS, count=count_positions
)


class ReplacedTokens(MaskedLM):
    """The objective of ELECTRA (Clark 2020, section 2).

    The generator's term is the mean over predicted tokens, the discriminator's over all positions but padding. No
    gradient flows through the samples (models that write `replaced_labels` draw them).
    """

    section = ReplacedTokensSection
    outputs: tuple[str, ...] = ("generator_logits", "replaced_logits", "replaced_labels")
    masked_tokens = "generator_logits"
    terms: tuple[LossTerm, ...] = (GENERATOR, replace(DISCRIMINATOR, weight=50.0))

    def __init__(self, section: ReplacedTokensSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        of_generator = replace(GENERATOR, weight=section.generator_weight)
        self.terms = (of_generator, replace(DISCRIMINATOR, weight=section.discriminator_weight), *self.terms[2:])

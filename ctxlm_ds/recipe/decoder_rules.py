"""What a decoder needs of the rest of its recipe: the objective causal_lm, the format blocks, its place of LayerNorm.

In: a RunConfig. Out: problems. Not here: what every model needs (check.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.schema import RunConfig


def decoder_problems(config: RunConfig) -> Iterator[Problem]:
    """A decoder, causal_lm and blocks go together; nothing else goes with any of them."""
    if config.model.is_decoder:
        yield from _decoder_with_others(config)
    else:
        yield from _encoder_with_others(config)
    if config.data.sample_format == "blocks":
        yield from _blocks_with_others(config)


def _decoder_with_others(config: RunConfig) -> Iterator[Problem]:
    family, family_path = config.model.family, ("model.family",)
    if config.objective.name != "causal_lm":
        text = f"{config.objective.name} is an encoder's; model.family {family} predicts the next token: set causal_lm"
        yield Problem("objective.name", text, family_path)
    if config.data.sample_format != "blocks":
        text = f"{config.data.sample_format} is an encoder's; set blocks for model.family {family}"
        yield Problem("data.sample_format", text, family_path)
    is_pre = family == "gpt2"
    if config.model.pre_layer_norm != is_pre:
        place, value = ("before", "true") if is_pre else ("after", "false")
        text = f"model.family {family} has LayerNorm {place} each block; set it to {value}"
        yield Problem("model.pre_layer_norm", text, family_path)


def _encoder_with_others(config: RunConfig) -> Iterator[Problem]:
    needs = f"needs a decoder, and model.family {config.model.family} is an encoder; set model.family to gpt2 or gpt1"
    if config.objective.name == "causal_lm":
        yield Problem("objective.name", f"causal_lm {needs}, or masked_lm here", ("model.family",))
    if config.data.sample_format == "blocks":
        yield Problem("data.sample_format", f"blocks {needs}, or full_sentences here", ("model.family",))


def _blocks_with_others(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if data.packing:
        text = "blocks are full rows by themselves (data.reset_at_documents keeps documents apart); set it to false"
        yield Problem("data.packing", text, ("data.sample_format",))
    if data.num_duplicates > 1:
        text = f"{data.num_duplicates}: blocks are the same in every pass; set it to 1 and train for more steps"
        yield Problem("data.num_duplicates", text, ("data.sample_format",))

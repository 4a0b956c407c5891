"""Counts by formula against the model that is built and torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_model
from ctxlm_ds.models.flops import forward_flops_per_row, parameter_count, training_flops_per_row
from ctxlm_ds.recipe.schema import KernelsConfig
from tests.encoder_batches import TERMS, random_batch, tiny_model
from tests.sections import model_section

SEQ_LENGTH, SLOTS = 20, 6
CAUSAL = ("causal_lm",)
MODELS = [
    (tiny_model(), TERMS),
    (tiny_model(), TERMS[:1]),
    (tiny_model(family="roberta"), TERMS[:1]),
    (tiny_model(family="roberta", pre_layer_norm=True, num_layers=3), TERMS[:1]),
    (tiny_model(family="gpt2", num_layers=3), CAUSAL),
    (tiny_model(family="gpt1", hidden_activation="gelu_tanh"), CAUSAL),
]


@pytest.mark.parametrize(("config", "terms"), MODELS)
def test_parameter_count(config: TransformerSection, terms: tuple[str, ...]) -> None:
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, packing=False)
    with torch.device("meta"):
        model = build_model(config, terms, kernels, seed=0)
    assert parameter_count(config, terms) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("config", "terms"), MODELS)
@pytest.mark.parametrize("lengths", [[[20], [7]], [[8, 5], [6, 6]]])
def test_flops_are_what_torch_counts(
    config: TransformerSection, terms: tuple[str, ...], lengths: list[list[int]]
) -> None:
    kernels = choose_kernels(KernelsConfig(attention="reference"), "cpu", torch.float32, packing=True)
    model = build_model(config, terms, kernels, seed=0)
    inputs = random_batch(lengths, config, SEQ_LENGTH, terms).model_inputs()
    with FlopCounterMode(display=False) as forward:
        outputs = model(inputs)
    with FlopCounterMode(display=False) as backward:
        torch.stack([output.sum() for output in outputs]).sum().backward()
    num_sequences = len(lengths[0])
    counts = config, terms, SEQ_LENGTH, SLOTS, num_sequences
    assert forward.get_total_flops() == len(lengths) * forward_flops_per_row(*counts)
    assert forward.get_total_flops() + backward.get_total_flops() == len(lengths) * training_flops_per_row(*counts)


def test_a_model_without_a_vocabulary_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        parameter_count(model_section(), TERMS)

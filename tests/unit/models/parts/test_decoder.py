"""What a decoder's tokens see, pre-LN and post-LN, with one sequence in a row and with several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctxlm_ds.kernels.attention_spec import AttentionSpec
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.parts.decoder import decoder_block
from ctxlm_ds.models.parts.transformer import BlockSettings
from ctxlm_ds.parallel.parameters import Normal, initialize_parameters

WIDTH, HEADS, SOURCE, TARGET = 8, 2, 6, 5
FIELDS = {
    "sequence_ids": torch.tensor([[1, 1, 1, 2, 2, 0]]),
    "sequence_starts": torch.tensor([[0, 3, 5]]),
    "decoder_sequence_ids": torch.tensor([[1, 1, 2, 2, 2]]),
    "decoder_sequence_starts": torch.tensor([[0, 2, 5]]),
}


def make(pre_layer_norm: bool) -> LayerSequence:
    kernels = KernelSet({}, "cpu", torch.float32)
    spec = AttentionSpec(WIDTH // HEADS, causal=True, shares_rows=True)
    settings = BlockSettings(
        hidden_size=WIDTH, num_heads=HEADS, intermediate_size=16, activation="gelu", norm_eps=1e-5, hidden_dropout=0.0,
        attention=spec, pre_layer_norm=pre_layer_norm, init=Normal(0.5), residual_init=Normal(0.5),
    )  # fmt: skip
    build = ModelBuild(("hidden",), kernels, shares_rows=True)
    module = LayerSequence([decoder_block("decoder.0", settings, build)], ["hidden"])
    initialize_parameters(module, 1)
    return module.eval()


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, memory = (torch.randn(1, length, WIDTH, generator=generator) for length in (TARGET, SOURCE))
    return {"hidden": hidden, "memory": memory, **FIELDS}


def changed_rows(module: LayerSequence, name: str, place: int) -> list[bool]:
    """Which places of the output depend on a place of an input."""
    with torch.no_grad():
        before = module.run(inputs())["hidden"]
        other = inputs()
        other[name][0, place] += 1.0
        return (module.run(other)["hidden"] != before).any(-1)[0].tolist()


@pytest.mark.parametrize("pre_layer_norm", [False, True])
def test_a_token_sees_earlier_ones_of_its_target_and_all_of_its_source(pre_layer_norm: bool) -> None:
    module = make(pre_layer_norm)
    for place, sequence in enumerate(FIELDS["decoder_sequence_ids"][0].tolist()):
        same = [other == sequence for other in FIELDS["decoder_sequence_ids"][0].tolist()]
        wanted = [same[other] and other >= place for other in range(TARGET)]
        assert changed_rows(module, "hidden", place) == wanted
    for place, sequence in enumerate(FIELDS["sequence_ids"][0].tolist()):
        wanted = [other == sequence for other in FIELDS["decoder_sequence_ids"][0].tolist()]
        assert changed_rows(module, "memory", place) == wanted

"""The plain Hugging Face models beside ours, with the weights carried over by the project's export tables."""

from __future__ import annotations

from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.export.base import export_of
from ctxlm_ds.export.hf_config import to_hf_config
from ctxlm_ds.export.key_maps import KeyMap
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.recipe.schema import KernelsConfig
from ctxlm_ds.recipe.sections import ModelSection
from tests.encoder_batches import PAD_ID


class Ids(NamedTuple):
    """The ids of special tokens in the batches."""

    pad_id: int = PAD_ID
    cls_id: int = 0
    sep_id: int = 2


def hf_model(config: ModelSection, outputs: tuple[str, ...]) -> nn.Module:
    """The class that the model is exported as, its weights drawn by transformers."""
    model, export = config, export_of(config.family)
    name = export.key_map(model, outputs, PAD_ID).hf_class
    return getattr(transformers, name)(to_hf_config(export, model, name, Ids(), "fp32"))


def key_map_of(config: ModelSection, outputs: tuple[str, ...]) -> KeyMap:
    """The table of that class."""
    return export_of(config.family).key_map(config, outputs, PAD_ID)


def randomize(model: nn.Module) -> None:
    """Add noise to every parameter, so that no bias is 0 and no norm is 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, device="cpu") * 0.1)


def our_model(
    config: ModelSection, outputs: tuple[str, ...], packing: bool = False, asked: KernelsConfig | None = None
) -> LayerSequence:
    """Our model in fp32 with the kernels asked for, or those that `auto` takes on the CPU."""
    kernels = KernelSet(dict(asked or {}), "cpu", torch.float32)
    return build_program(config, ModelBuild(outputs, kernels, shares_rows=packing)).module(0)


def copy_weights(theirs: nn.Module, ours: nn.Module, key_map: KeyMap) -> None:
    """Give our model the weights of theirs."""
    values = dict(theirs.state_dict())
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == {row.ours for row in key_map.rows}
    with torch.no_grad():
        for row in key_map.rows:
            parameters[row.ours].copy_(row.to_ours(values.__getitem__))


def hf_inputs(batch: Batch, config: ModelSection) -> dict[str, Tensor]:
    """The same rows (one sequence each) as a Hugging Face model takes them."""
    return export_of(config.family).their_inputs(batch.fields)

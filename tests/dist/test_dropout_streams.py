"""Tensor-parallel ranks drop the same where they hold the same, and independently where each holds its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.recipe.schema import KernelsConfig
from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.layer_list import LayerDescription, run_layer
from ctxlm_ds.models.transformer import TransformerLayer
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.random import DropoutStreams
from ctxlm_ds.parallel.topology import build_topology
from tests.dist.runner import run_ranks
from tests.dist.training import tiny_config

pytestmark = pytest.mark.dist
ROWS, LENGTH, P = 8, 64, 0.5


class Recorder:
    """An attention kernel and a dropout that keep the masks they drew."""

    def __init__(self) -> None:
        self.attention: list[torch.Tensor] = []
        self.hidden: list[torch.Tensor] = []

    def kernel(self, query: Any, key: Any, value: Any, ids: Any, starts: Any, dropout_p: float) -> torch.Tensor:
        self.attention.append(functional.dropout(torch.ones_like(query), dropout_p) > 0)
        return value

    def hook(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.hidden.append(output != 0)


def draw_masks(rank: int, size: int, sequence_parallel: bool, recompute: bool) -> dict[str, Any]:
    """Masks of two layers, of the second micro-batch's repetition and, if recomputed, of the backward pass."""
    topology = build_topology(tensor_parallel_size=size)
    streams = DropoutStreams(7, rank, size, enabled=True)
    parallel = ParallelContext(size, rank, topology.tensor_group, sequence_parallel, dropout=streams)
    recorder = Recorder()
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, False)
    kernels = dataclasses.replace(kernels, attention=recorder.kernel)
    config = tiny_config().model.model_copy(update={"hidden_dropout": P, "attention_dropout": P})
    layers = []
    for index in range(2):
        settings = {"config": config, "kernels": kernels, "parallel": parallel}
        description = LayerDescription(f"encoder.{index}", TransformerLayer, settings, recompute=recompute)
        module = description.build().train()
        module.dropout.register_forward_hook(recorder.hook)
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        layers.append((description, module))
    tokens = ROWS * LENGTH // (size if sequence_parallel else 1)
    hidden = torch.randn(tokens, 16) if sequence_parallel else torch.randn(ROWS, LENGTH, 16)
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    for number in (3, 4, 3):
        streams.micro_batch = (1, number)
        tensors: tuple[torch.Tensor, ...] = (hidden.clone().requires_grad_(), ids, ids)
        for index, (description, module) in enumerate(layers):
            tensors = run_layer(description, module, tensors, index, streams)
        streams.micro_batch = (9, 9)  # a pipeline has gone on to another micro-batch when this one's backward comes
        tensors[0].sum().backward()
    return {"attention": recorder.attention, "hidden": recorder.hidden}


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().float(), b.flatten().float()]))[0, 1])


def assert_independent(a: torch.Tensor, b: torch.Tensor) -> None:
    """Correlation within four standard errors of 0, and each drops its share."""
    assert abs(correlation(a, b)) < 4 / a.numel() ** 0.5
    for mask in (a, b):
        assert abs(float(mask.float().mean()) - (1 - P)) < 4 * 0.5 / mask.numel() ** 0.5


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_agree_where_they_must_and_are_independent_elsewhere(sequence_parallel: bool) -> None:
    first, second = run_ranks(draw_masks, 2, sequence_parallel, False, timeout_s=60)
    assert len(first["attention"]) == 6 and len(first["hidden"]) == 12
    for a, b in zip(first["attention"], second["attention"], strict=True):
        assert_independent(a, b)
    for a, b in zip(first["hidden"], second["hidden"], strict=True):
        if sequence_parallel:
            assert_independent(a, b)
        else:
            assert torch.equal(a, b)


def test_layers_micro_batches_and_places_in_a_layer_are_independent() -> None:
    masks = run_ranks(draw_masks, 1, False, False, timeout_s=60)[0]
    hidden = masks["hidden"][:8]
    for i, a in enumerate(hidden):
        for b in hidden[:i]:
            assert_independent(a, b)
    assert_independent(masks["attention"][0], masks["attention"][1])
    # The first micro-batch came again at the end, with the same masks.
    for kind, each in (("attention", 2), ("hidden", 4)):
        for a, b in zip(masks[kind][:each], masks[kind][2 * each :], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("size", [1, 2])
def test_a_recomputed_layer_draws_its_masks_again(size: int) -> None:
    plain = run_ranks(draw_masks, size, False, False, timeout_s=60)
    for expected, got in zip(plain, run_ranks(draw_masks, size, False, True, timeout_s=60), strict=True):
        # Forward through both layers, then backward from the second: each micro-batch draws twice as often.
        for number in range(3):
            forward, again = got["attention"][4 * number : 4 * number + 2], got["attention"][4 * number + 2 :][:2]
            wanted = expected["attention"][2 * number : 2 * number + 2]
            assert all(torch.equal(a, b) for a, b in zip(forward, wanted, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(again, wanted[::-1], strict=True))

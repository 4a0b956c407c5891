"""Hidden states are dropped alike in every layout; attention probabilities independently on tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionSpec
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import CarriedStates, ModelBuild, run_layer
from ctxlm_ds.models.program import build_program
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.topology import build_topology
from tests.dist.runner import run_ranks
from tests.dist.training import tiny_config

pytestmark = pytest.mark.dist
ROWS, LENGTH, P = 8, 64, 0.5
CPU = torch.device("cpu")


class Recorder(KernelSet):
    """An attention kernel and a dropout that keep the masks they drew."""

    def __init__(self) -> None:
        super().__init__({}, "cpu", torch.float32)
        self.attention_masks: list[torch.Tensor] = []
        self.hidden_masks: list[torch.Tensor] = []

    def attention(self, spec: AttentionSpec) -> Any:
        def draw(query: Any, key: Any, value: Any, call: AttentionCall) -> torch.Tensor:
            self.attention_masks.append(functional.dropout(torch.ones_like(query), call.p) > 0)
            return value

        return draw

    def hook(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.hidden_masks.append(output.detach() != 0)


def draw_masks(rank: int, size: int, sequence_parallel: bool, recompute: bool) -> dict[str, Any]:
    """Masks of two layers, of the second micro-batch's repetition and, if recomputed, of the backward pass."""
    topology = build_topology(tensor_parallel_size=size)
    streams = DropoutStreams(7, rank, size, enabled=True)
    parallel = ParallelContext(size, rank, topology.tensor_group, sequence_parallel, dropout=streams)
    recorder = Recorder()
    build = ModelBuild(("predicted_logits",), recorder, parallel, recompute=recompute)
    descriptions = [layer for layer in build_program(tiny_config(dropout=P).model, build).layers if layer.block]
    streams.num_layers = len(descriptions)
    layers = [(description, description.build().train()) for description in descriptions]
    for _, module in layers:
        for dropout in (module.dropout, module.mlp_dropout):
            dropout.register_forward_hook(recorder.hook)
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, 0.5)
    hidden = torch.randn(ROWS, LENGTH, 16, generator=torch.Generator().manual_seed(0))
    if sequence_parallel:
        hidden = hidden.flatten(0, 1).chunk(size)[rank]
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    for number in (3, 4, 3):
        streams.begin(1, number, CPU)
        tensors = {"hidden": hidden.clone().requires_grad_(), "sequence_ids": ids, "sequence_starts": ids}
        for index, (description, module) in enumerate(layers):
            run_layer(description, module, tensors, index, streams, CarriedStates())
        streams.begin(9, 9, CPU)  # a pipeline has gone on to another micro-batch when this one's backward comes
        tensors["hidden"].sum().backward()
    return {"attention": recorder.attention_masks, "hidden": recorder.hidden_masks}


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().float(), b.flatten().float()]))[0, 1])


def assert_independent(a: torch.Tensor, b: torch.Tensor) -> None:
    """Correlation within four standard errors of 0, and each drops its share."""
    assert abs(correlation(a, b)) < 4 / a.numel() ** 0.5
    for mask in (a, b):
        assert abs(float(mask.float().mean()) - (1 - P)) < 4 * 0.5 / mask.numel() ** 0.5


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Masks of one rank."""
    return run_ranks(draw_masks, 1, False, False, timeout_s=60)[0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_drop_attention_independently(sequence_parallel: bool) -> None:
    first, second = run_ranks(draw_masks, 2, sequence_parallel, False, timeout_s=60)
    assert len(first["attention"]) == 6
    for a, b in zip(first["attention"], second["attention"], strict=True):
        assert_independent(a, b)


def test_layers_micro_batches_and_places_in_a_layer_are_independent(alone: dict[str, Any]) -> None:
    hidden = alone["hidden"][:8]
    for i, a in enumerate(hidden):
        for b in hidden[:i]:
            assert_independent(a, b)
    assert_independent(alone["attention"][0], alone["attention"][1])
    # The first micro-batch came again at the end, with the same masks.
    for kind, each in (("attention", 2), ("hidden", 4)):
        for a, b in zip(alone[kind][:each], alone[kind][2 * each :], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("size", [1, 2])
def test_a_recomputed_layer_draws_its_masks_again(size: int) -> None:
    plain = run_ranks(draw_masks, size, False, False, timeout_s=60)
    for expected, got in zip(plain, run_ranks(draw_masks, size, False, True, timeout_s=60), strict=True):
        # Forward through both layers, then backward from the second: each micro-batch draws twice as often.
        for kind, each in (("attention", 1), ("hidden", 2)):
            for number in range(3):
                wanted = expected[kind][2 * each * number :][: 2 * each]
                drawn = got[kind][4 * each * number :][: 4 * each]
                forward, again = drawn[: 2 * each], drawn[2 * each :]
                assert all(torch.equal(a, b) for a, b in zip(forward, wanted, strict=True))
                turned = wanted[each:] + wanted[:each]
                assert all(torch.equal(a, b) for a, b in zip(again, turned, strict=True))

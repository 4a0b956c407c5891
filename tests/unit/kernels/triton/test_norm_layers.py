"""Models whose layers sum, drop and normalise in Triton's kernel: the losses and gradients of the steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctxlm_ds.kernels.attention_spec import AttentionSpec
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.implementation import Implementation
from ctxlm_ds.kernels.triton.launch import recorded
from ctxlm_ds.kernels.triton.rows import ROWS
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.parts.decoder import decoder_block
from ctxlm_ds.models.parts.transformer import BlockSettings
from ctxlm_ds.models.program import build_program
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.parameters import Normal, initialize_parameters
from ctxlm_ds.registry import KERNELS
from tests.encoder_batches import OUTPUTS, random_batch, tiny_model
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long

WIDTH, HEADS, SOURCE, TARGET = 24, 2, 6, 5


def build(row: str) -> ModelBuild:
    """Choose a row of the operation; the recipe's name `triton` asks for a device, which the interpreter is not."""
    if "add_norm.interpreted" not in KERNELS:
        KERNELS.register("add_norm.interpreted", Implementation("interpreted", ROWS["add_norm"].make))
    kernels = KernelSet({"add_norm": row}, "cpu", torch.float32)
    parallel = ParallelContext(dropout=DropoutStreams(seed=5, enabled=True))
    return ModelBuild(OUTPUTS, kernels, parallel, shares_rows=True)


def gradients(model: LayerSequence, fields: dict[str, Tensor], sums: int) -> list[Tensor]:
    """Return a loss and its gradients, and check that the forward and the backward pass took so many kernels."""
    model.streams.begin(3, 1, torch.device("cpu"))
    with recorded() as launches:
        outputs = model.run(fields).values()
        loss = sum((x[x.isfinite()].sin().sum() for x in outputs), torch.zeros(()))
        found = torch.autograd.grad(loss, list(model.parameters()))
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["add_norm_kernel"] * sums + ["add_norm_gradient_kernel"] * sums
    return [loss, *found]


@pytest.mark.parametrize(
    ("pre_layer_norm", "sums"),
    [(False, 3), (True, 2)],  # before attention, and after the feed-forward part, is another layer's sum
)
@pytest.mark.parametrize("rms_norm", [False, True])
@in_interpreter
def test_a_decoder_layer(pre_layer_norm: bool, sums: int, rms_norm: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, memory = (torch.randn(2, length, WIDTH, generator=draw) for length in (TARGET, SOURCE))
    lengths = {"decoder_sequence": torch.tensor([[0, TARGET]] * 2), "sequence": torch.tensor([[0, SOURCE]] * 2)}
    fields = {"hidden": hidden, "memory": memory} | {f"{name}_starts": x for name, x in lengths.items()}
    fields |= {f"{name}_ids": torch.ones(2, int(x[0, 1]), dtype=torch.int64) for name, x in lengths.items()}
    settings = BlockSettings(
        hidden_size=WIDTH, num_heads=HEADS, intermediate_size=16, activation="gelu", norm_eps=1e-5, hidden_dropout=0.2,
        attention=AttentionSpec(WIDTH // HEADS, causal=True, shares_rows=True), pre_layer_norm=pre_layer_norm,
        init=Normal(0.3), residual_init=Normal(0.3), rms_norm=rms_norm,
    )  # fmt: skip
    results = []
    for row, launched in (("torch", 0), ("interpreted", sums)):
        made = build(row)
        block = decoder_block("decoder.0", settings, made)
        model = LayerSequence([block], ["hidden"], made.parallel.dropout)
        initialize_parameters(model, 1)
        results.append(gradients(model, fields, launched))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@in_interpreter
def test_an_encoder_with_its_embeddings() -> None:
    config = tiny_model(hidden_dropout=0.1)
    fields = random_batch([[5, 4], [3, 8]], config, 12).fields
    results = []
    for row, launched in (("torch", 0), ("interpreted", 5)):
        results.append(gradients(build_program(config, build(row)).module(1), fields, launched))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())

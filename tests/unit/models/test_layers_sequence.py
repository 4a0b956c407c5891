"""A family's list as one module, and what may be switched on for each layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.implementation import why_compiled_cannot_run
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from tests.encoder_batches import random_batch, tiny_model

SEQ_LENGTH = 20
LENGTHS = [[8, 5], [20], [3, 4]]
BOTH = ("predicted_logits", "sentence_logits")
Fields = dict[str, Tensor]


def build_of(outputs: tuple[str, ...] = BOTH, dtype: torch.dtype = torch.float32, **options: Any) -> ModelBuild:
    kernels = KernelSet({}, "cpu", dtype)
    parallel = ParallelContext(dropout=DropoutStreams(5, enabled=True))
    return ModelBuild(outputs, kernels, parallel, shares_rows=True, **options)


def model_of(config: TransformerSection, outputs: tuple[str, ...] = BOTH, **options: Any) -> LayerSequence:
    return build_program(config, build_of(outputs, **options)).module(3)


def batch_of(config: TransformerSection, lengths: list[list[int]] = LENGTHS) -> Fields:
    return random_batch(lengths, config, SEQ_LENGTH).fields


def loss_and_gradients(model: LayerSequence, fields: Fields, step: int = 0) -> tuple[Tensor, Fields]:
    model.zero_grad()
    model.streams.begin(step, 0, torch.device("cpu"))
    loss = torch.stack([output.square().mean() for output in model.run(fields).values()]).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def logits(model: LayerSequence, fields: Fields, step: int = 0) -> Tensor:
    model.streams.begin(step, 0, torch.device("cpu"))
    return model.run(fields)["predicted_logits"]


def test_every_floating_tensor_that_crosses_gets_a_gradient() -> None:
    """What a pipeline needs of the tensors between any two layers."""
    config = tiny_model(pre_layer_norm=True)
    model = model_of(config)
    tensors = batch_of(config)
    crossed = []
    for index, description in enumerate(build_program(config, build_of()).layers):
        module = model.get_submodule(description.name)
        written = module(*[tensors[name] for name in description.reads], **description.call_kwargs)
        written = written if isinstance(written, tuple) else (written,)
        tensors.update(zip(description.writes, written, strict=True))
        crossed += [tensors[name] for name in model.flow.before(index + 1).with_gradient]
    for tensor in crossed:
        tensor.retain_grad()
    torch.stack([tensors[name].sum() for name in model.outputs]).sum().backward()
    assert crossed and all(tensor.grad is not None for tensor in crossed)
    assert [tuple(tensors[name].shape) for name in model.outputs] == [(3, 6, 61), (3, 2, 2)]


@pytest.mark.parametrize("kind", ["hidden_dropout", "attention_dropout"])
def test_dropout_in_training_and_not_in_evaluation(kind: str) -> None:
    config = tiny_model(**{kind: 0.2})
    fields = batch_of(config)
    model = model_of(config).train()
    assert not torch.equal(logits(model, fields), logits(model, fields, step=1))
    assert torch.equal(logits(model, fields), logits(model, fields))
    model.eval()
    assert torch.equal(logits(model, fields), logits(model, fields, step=1))


@pytest.mark.long
@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
def test_compiled_layers_give_the_same_loss_and_gradients_under_the_same_names() -> None:
    """With what dropout drops in every step: the keys are inputs of the compiled code and not part of it."""
    config = tiny_model(num_layers=1, hidden_dropout=0.4)
    fields = batch_of(config)
    plain, compiled = model_of(config), model_of(config, compile=True)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    losses = set()
    for step in range(3):
        loss, gradients = loss_and_gradients(plain, fields, step)
        again, compiled_gradients = loss_and_gradients(compiled, fields, step)
        torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        losses.add(round(loss.item(), 4))
    assert len(losses) == 3


def test_bf16_is_finite_and_near_fp32() -> None:
    config = tiny_model()
    fields = batch_of(config)
    exact, gradients = loss_and_gradients(model_of(config), fields)
    loss, rounded = loss_and_gradients(model_of(config, dtype=torch.bfloat16).to(torch.bfloat16), fields)
    torch.testing.assert_close(loss.float(), exact, rtol=0.05, atol=0)
    assert all(gradient.dtype == torch.bfloat16 and gradient.isfinite().all() for gradient in rounded.values())
    for name, gradient in gradients.items():
        if not name.endswith("qkv.bias"):  # its key third is 0 but for rounding
            cosine = torch.nn.functional.cosine_similarity(rounded[name].float().flatten(), gradient.flatten(), dim=0)
            assert cosine > 0.98, name


def test_a_copy_is_independent() -> None:
    config = tiny_model()
    fields = batch_of(config)
    model = model_of(config).eval()
    before = logits(model, fields)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.word_embeddings.weight.zero_()
    assert torch.equal(logits(model, fields), before)
    assert not torch.equal(logits(copied, fields), before)

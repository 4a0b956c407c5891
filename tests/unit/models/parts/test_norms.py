"""The norms as modules: transformers' values, what they declare, and which kernel computes them."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.parts.norms import LayerNorm, RMSNorm
from ctxlm_ds.parallel.parameters import ONES, ZEROS, ParameterFacts, collect_facts

WIDTH, EPS = 24, 1e-5


def kernels(name: str = "auto") -> KernelSet:
    return KernelSet({"layer_norm": name}, "cpu", torch.float32)


@pytest.mark.parametrize("kernel", ["torch", "reference"])
@pytest.mark.parametrize("theirs", [LlamaRMSNorm, T5LayerNorm])
def test_rms_norm_and_its_gradients_are_those_of_transformers(kernel: str, theirs: type[torch.nn.Module]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, WIDTH, generator=generator).requires_grad_()
    weight, upstream = torch.randn(WIDTH, generator=generator), torch.randn(3, 5, WIDTH, generator=generator)
    found = []
    for module in (RMSNorm(WIDTH, EPS, kernels(kernel)), theirs(WIDTH, eps=EPS)):
        (parameter,) = module.parameters()
        parameter.data.copy_(weight)
        y = module(x)
        found.append((y, *torch.autograd.grad(y, (x, parameter), upstream)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_weights_begin_at_one_and_do_not_decay() -> None:
    assert collect_facts(RMSNorm(WIDTH, EPS, kernels())) == {"weight": ParameterFacts(ONES, decays=False)}
    facts = collect_facts(LayerNorm(WIDTH, EPS, kernels(), optional=True))
    wanted = {"weight": ONES, "bias": ZEROS}
    assert facts == {name: ParameterFacts(init, decays=False, optional=True) for name, init in wanted.items()}
    assert collect_facts(LayerNorm(WIDTH, EPS, kernels(), bias=False)).keys() == {"weight"}

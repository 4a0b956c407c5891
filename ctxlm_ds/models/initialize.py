"""Initial values that do not depend on the layout: seed and full name are the key of each parameter's stream."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctxlm_ds.parallel.parameters import Constant, Init, Uniform, collect_facts

STREAM_PURPOSE = "ctxlm_ds initial value"


def initial_value(name: str, shape: Sequence[int], init: Init, seed: int) -> Tensor:
    """Return the full parameter's fp32 value on the CPU, the same one for every rank, device and layout.

    Args:
        name: full name of the parameter.
        shape: shape of the full parameter.
        init: distribution that its module declares.
        seed: seed of the run.
    """
    value = torch.empty(tuple(shape), device="cpu", dtype=torch.float32)
    if isinstance(init, Constant):
        return value.fill_(init.value)
    generator = torch.Generator(device="cpu").manual_seed(_stream_seed(name, seed))
    if isinstance(init, Uniform):
        return value.uniform_(-init.limit, init.limit, generator=generator)
    deviation = init.standard_deviation
    if init.truncated:
        nn.init.trunc_normal_(value, 0.0, deviation, -2 * deviation, 2 * deviation, generator=generator)
    else:
        value.normal_(0.0, deviation, generator=generator)
    for factor, rows in zip(init.row_factors, value.chunk(max(1, len(init.row_factors))), strict=False):
        rows.mul_(factor)
    return value


def initialize_parameters(module: nn.Module, seed: int) -> None:
    """Set every parameter of a complete model to its initial value, rounded to its type; skip `meta` parameters."""
    facts = collect_facts(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(initial_value(name, parameter.shape, facts[name].init, seed))


def _stream_seed(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{STREAM_PURPOSE}\0{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)

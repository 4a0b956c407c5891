"""Initial values that do not depend on the layout: each parameter has its own stream, keyed by seed and full name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctxlm_ds.families.base import TransformerSection

STREAM_PURPOSE = "ctxlm_ds initial value"
RESIDUAL_PROJECTIONS = ("attention.output.weight", "mlp.down.weight")


def initial_value(name: str, shape: Sequence[int], config: TransformerSection, seed: int) -> Tensor:
    """The full parameter's fp32 value on the CPU, whatever rank, device or layout asks for it.

    Biases are 0, LayerNorm weights 1, matrices and embeddings normal with standard deviation initializer_range (the
    values of transformers' BERT; the original draws truncate at two deviations). GPT-2's matrices that end on the
    residual stream have that over sqrt(2 x layers) (Radford 2019, section 2.3). `name` is the parameter's full name.
    """
    kind = name.rpartition(".")[2]
    if kind == "bias":
        return torch.zeros(shape, device="cpu", dtype=torch.float32)
    if "layer_norm" in name:
        return torch.ones(shape, device="cpu", dtype=torch.float32)
    generator = torch.Generator(device="cpu").manual_seed(_stream_seed(name, seed))
    value = torch.empty(tuple(shape), device="cpu", dtype=torch.float32)
    deviation = config.initializer_range
    if config.family == "gpt2" and name.endswith(RESIDUAL_PROJECTIONS):
        deviation /= math.sqrt(2 * config.num_layers)
    return value.normal_(0.0, deviation, generator=generator)


def initialize_parameters(module: nn.Module, config: TransformerSection, seed: int) -> None:
    """Give every parameter of a whole model its initial value, rounded to its type; `meta` parameters stay empty."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(initial_value(name, parameter.shape, config, seed))


def _stream_seed(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{STREAM_PURPOSE}\0{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)

"""The kernels of a run: one implementation of each operation, or one for each kind of layer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ctxlm_ds.kernels import attention, bias_gelu, cross_entropy, dropout, linear, norm, rotary
from ctxlm_ds.kernels.attention_spec import AttentionKernel, AttentionSpec
from ctxlm_ds.kernels.bias_gelu import BiasGeluKernel, GatedKernel
from ctxlm_ds.kernels.cross_entropy import CrossEntropyKernel
from ctxlm_ds.kernels.dropout import DropoutKernel, SamplingKernel
from ctxlm_ds.kernels.implementation import Implementation, Need, choose
from ctxlm_ds.kernels.linear import LinearKernel
from ctxlm_ds.kernels.norm import AddNormKernel, AddNormSpec, LayerNormKernel, RmsNormKernel
from ctxlm_ds.kernels.rotary import RotaryKernel
from ctxlm_ds.kernels.triton.rows import ROWS as TRITON

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""training.precision -> type of parameters and activations."""
OPERATIONS: dict[str, tuple[Implementation, ...]] = {
    "attention": (TRITON["attention"], *attention.IMPLEMENTATIONS),
    "layer_norm": norm.IMPLEMENTATIONS,
    "bias_gelu": (TRITON["bias_gelu"], *bias_gelu.IMPLEMENTATIONS),
    "rotary": (TRITON["rotary"], *rotary.IMPLEMENTATIONS),
    "linear": linear.IMPLEMENTATIONS,
    "dropout": (TRITON["dropout"], *dropout.IMPLEMENTATIONS),
    "add_norm": (TRITON["add_norm"], *norm.ADD_NORM),
    "sampling": dropout.SAMPLING,
    "cross_entropy": (TRITON["cross_entropy"], *cross_entropy.IMPLEMENTATIONS),
}
"""Setting of a recipe's `kernels` section -> its implementations, the preferred first."""


def table_of(operation: str, asked: str) -> tuple[Implementation, ...]:
    """Return the implementations of an operation, with the one of another package if the recipe asks for it."""
    from ctxlm_ds.registry import KERNELS  # model code stays readable without the registry

    name = f"{operation}.{asked}"
    return (*OPERATIONS[operation], *([replace(KERNELS.get(name), name=asked)] if name in KERNELS else []))


class KernelSet:
    """The kernels of a run. Models call them and know nothing else about devices."""

    def __init__(self, names: Mapping[str, str], device_type: str, dtype: torch.dtype) -> None:
        """Choose the first implementation of each operation that suits and runs, or the one that `names` has.

        `names` maps operations to implementations, as a recipe's `kernels` section; an operation left out is `auto`.
        `device_type` is torch's name of the device, `dtype` the type of the activations. Raises KernelError if a named
        implementation cannot run here (for attention when a layer asks for it).
        """
        self._names, self._device_type, self.dtype = names, device_type, dtype
        self._chosen: dict[tuple[str, Hashable], tuple[str, Any]] = {}
        self.layer_norm: LayerNormKernel = self._kernel("layer_norm", norm.LAYER)
        self.linear: LinearKernel = self._kernel("linear")
        self.dropout: DropoutKernel = self._kernel("dropout")
        self.bias_gelu: BiasGeluKernel = self._kernel("bias_gelu")

    def attention(self, spec: AttentionSpec) -> AttentionKernel:
        """Return the implementation for a layer's attention."""
        return self._kernel("attention", spec)

    @property
    def rms_norm(self) -> RmsNormKernel:
        """RMSNorm by the implementation of `kernels.layer_norm`; raises KernelError if it cannot run."""
        return self._kernel("layer_norm", norm.RMS)

    def add_norm(self, kind: str, width: int) -> AddNormKernel:
        """Return the implementation for a norm of this kind (kernels/norm.py) and width, with sum and dropout."""
        return self._kernel("add_norm", AddNormSpec(kind, width, self._kernel("layer_norm", kind), self.dropout))

    @property
    def sampling(self) -> SamplingKernel:
        """Return the implementation for layers that draw words."""
        return self._kernel("sampling")

    @property
    def cross_entropy(self) -> CrossEntropyKernel | None:
        """Return the implementation for decoders that compare their scores with labels; None: a loss term compares."""
        return self._kernel("cross_entropy")

    @property
    def gated_activation(self) -> GatedKernel:
        """Gated activation by the implementation of `kernels.bias_gelu`."""
        return self._kernel("bias_gelu", bias_gelu.GATED)

    @property
    def rotary(self) -> RotaryKernel:
        """Return the implementation for layers with rotary positions."""
        return self._kernel("rotary")

    @property
    def names(self) -> dict[str, str]:
        """Operation -> name of its implementation, for operations that layers use."""
        found: dict[str, set[str]] = {operation: set() for operation in OPERATIONS}
        for (operation, _), (name, _) in self._chosen.items():
            found[operation].add(name)
        return {operation: " and ".join(sorted(names)) for operation, names in found.items() if names}

    def asked(self, operation: str) -> str:
        """Return the name that was asked for, or `auto`."""
        return self._names.get(operation, "auto")

    def describe(self) -> str:
        """Return one line for the log, such as `attention sdpa, layer_norm torch, linear torch`."""
        return ", ".join(f"{operation} {name}" for operation, name in self.names.items())

    def _kernel(self, operation: str, spec: Hashable = None) -> Any:
        """Return the implementation for a spec, chosen once."""
        if (operation, spec) not in self._chosen:
            need = Need(spec, self._device_type, self.dtype)
            asked = self.asked(operation)
            chosen = choose(operation, asked, table_of(operation, asked), need)
            self._chosen[operation, spec] = chosen.name, chosen.make(need)
        return self._chosen[operation, spec][1]

"""Which implementation computes each operation: chosen once, before the model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.attention import (
    AttentionKernel,
    AttentionSpec,
    SdpaAttention,
    reference_attention,
    varlen_attention,
    why_varlen_cannot_run,
)
from ctxlm_ds.kernels.bias_gelu import (
    BiasGeluKernel,
    CompiledBiasGelu,
    ReferenceBiasGelu,
    TorchBiasGelu,
    why_compiled_cannot_run,
)
from ctxlm_ds.kernels.layer_norm import (
    LayerNormKernel,
    apex_layer_norm,
    reference_layer_norm,
    torch_layer_norm,
    why_apex_cannot_run,
)
from ctxlm_ds.kernels.linear import LinearKernel, bf16_is_emulated, float32_linear, torch_linear
from ctxlm_ds.recipe.schema import KernelsConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""training.precision -> type of parameters and activations."""
LAYER_NORM_KERNELS: dict[str, LayerNormKernel] = {
    "reference": reference_layer_norm,
    "torch": torch_layer_norm,
    "apex": apex_layer_norm,
}
BIAS_GELU_KERNELS: dict[str, Callable[[LinearKernel], BiasGeluKernel]] = {
    "reference": ReferenceBiasGelu,
    "torch": TorchBiasGelu,
    "compiled": CompiledBiasGelu,
}


class KernelSet:
    """The implementations of a run; models call them and know nothing else about devices."""

    def __init__(self, config: KernelsConfig, device_type: str, dtype: torch.dtype) -> None:
        """Choose each operation's fastest implementation that runs here, or exactly the one asked for by name.

        Args:
            config: the recipe's `kernels` section.
            device_type: torch's (`cpu`, `cuda`).
            dtype: of the activations.

        Raises:
            KernelError: an implementation asked for by name cannot run here; the message has the reason.
        """
        self._config, self._device_type, self._dtype = config, device_type, dtype
        self._in_float32 = dtype == torch.bfloat16 and bf16_is_emulated(device_type)
        self._attention: dict[AttentionSpec, tuple[str, AttentionKernel]] = {}
        linear = _choose("linear", config.linear, "float32" if self._in_float32 else "torch", {})
        self.linear: LinearKernel = {"torch": torch_linear, "float32": float32_linear}[linear]
        no_apex = why_apex_cannot_run(device_type)
        norm = _choose("layer_norm", config.layer_norm, "apex" if no_apex is None else "torch", {"apex": no_apex})
        self.layer_norm: LayerNormKernel = LAYER_NORM_KERNELS[norm]
        no_compiled = why_compiled_cannot_run(device_type) if config.bias_gelu == "compiled" else None
        bias_gelu = _choose("bias_gelu", config.bias_gelu, "torch", {"compiled": no_compiled})
        self.bias_gelu: BiasGeluKernel = BIAS_GELU_KERNELS[bias_gelu](self.linear)
        self._names = {"layer_norm": norm, "bias_gelu": bias_gelu, "linear": linear}

    @property
    def names(self) -> dict[str, str]:
        """Operation -> name of its implementation as in KernelsConfig; attention as far as layers have asked for it."""
        attention = sorted({name for name, _ in self._attention.values()})
        return {"attention": " and ".join(attention) or self._config.attention, **self._names}

    def attention(self, spec: AttentionSpec) -> AttentionKernel:
        """Return the implementation for a layer's attention.

        Raises:
            KernelError: the one asked for by name cannot compute it here.
        """
        if spec not in self._attention:
            no_varlen = why_varlen_cannot_run(self._device_type, self._dtype, spec.dropout, spec.head_size)
            best = "varlen" if spec.shares_rows and no_varlen is None else "sdpa"
            name = _choose("attention", self._config.attention, best, {"varlen": no_varlen})
            kernels: dict[str, AttentionKernel] = {
                "reference": partial(reference_attention, causal=spec.causal),
                "sdpa": SdpaAttention(spec.shares_rows, self._in_float32, spec.causal),
                "varlen": partial(varlen_attention, causal=spec.causal),
            }
            self._attention[spec] = name, kernels[name]
        return self._attention[spec][1]

    def describe(self) -> str:
        """Return one line for the log, such as `attention sdpa, layer_norm torch, bias_gelu torch, linear torch`."""
        return ", ".join(f"{operation} {name}" for operation, name in self.names.items())


def choose_kernels(config: KernelsConfig, device_type: str, dtype: torch.dtype) -> KernelSet:
    """Choose the implementations of a run (KernelSet)."""
    return KernelSet(config, device_type, dtype)


def _choose(operation: str, asked: str, automatic: str, problems: Mapping[str, str | None]) -> str:
    """The implementation's name; KernelError where `asked` for by name cannot run."""
    if asked == "auto":
        return automatic
    problem = problems.get(asked)
    if problem is not None:
        raise KernelError(
            f"kernels.{operation}: `{asked}` cannot run here: {problem}. "
            f"Set kernels.{operation} to `auto` (`{automatic}` here)."
        )
    return asked

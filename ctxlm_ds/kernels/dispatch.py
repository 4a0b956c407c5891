"""Which implementation computes each operation: chosen once, before the model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.attention import (
    AttentionKernel,
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


@dataclass(frozen=True)
class KernelSet:
    """The chosen implementations; models call them and know nothing else about devices."""

    attention: AttentionKernel
    layer_norm: LayerNormKernel
    bias_gelu: BiasGeluKernel
    linear: LinearKernel
    names: Mapping[str, str]
    """Operation -> name of its implementation as in KernelsConfig."""

    def describe(self) -> str:
        """One line for the log, such as `attention sdpa, layer_norm torch, bias_gelu torch, linear torch`."""
        return ", ".join(f"{operation} {name}" for operation, name in self.names.items())


def choose_kernels(
    config: KernelsConfig,
    device_type: str,
    dtype: torch.dtype,
    packing: bool,
    attention_dropout: float = 0.0,
    head_size: int = 64,
    causal: bool = False,
) -> KernelSet:
    """Take each operation's fastest implementation that runs here, or exactly the one asked for by name.

    `device_type` is torch's (`cpu`, `cuda`), `dtype` that of the activations; `attention_dropout` and `head_size`
    are the model's, for FlashAttention has limits on both; `causal` where positions see earlier ones only. Raises
    KernelError with the reason where an implementation asked for by name cannot run.
    """
    in_float32 = dtype == torch.bfloat16 and bf16_is_emulated(device_type)
    no_varlen = why_varlen_cannot_run(device_type, dtype, attention_dropout, head_size)
    no_apex = why_apex_cannot_run(device_type)
    no_compiled = why_compiled_cannot_run(device_type) if config.bias_gelu == "compiled" else None

    linear = _choose("linear", config.linear, "float32" if in_float32 else "torch", {})
    linear_kernel: LinearKernel = {"torch": torch_linear, "float32": float32_linear}[linear]
    best_attention = "varlen" if packing and no_varlen is None else "sdpa"
    attention = _choose("attention", config.attention, best_attention, {"varlen": no_varlen})
    attention_kernels: dict[str, AttentionKernel] = {
        "reference": partial(reference_attention, causal=causal),
        "sdpa": SdpaAttention(packing, compute_in_float32=in_float32, causal=causal),
        "varlen": partial(varlen_attention, causal=causal),
    }
    layer_norm = _choose("layer_norm", config.layer_norm, "apex" if no_apex is None else "torch", {"apex": no_apex})
    bias_gelu = _choose("bias_gelu", config.bias_gelu, "torch", {"compiled": no_compiled})
    return KernelSet(
        attention=attention_kernels[attention],
        layer_norm=LAYER_NORM_KERNELS[layer_norm],
        bias_gelu=BIAS_GELU_KERNELS[bias_gelu](linear_kernel),
        linear=linear_kernel,
        names={"attention": attention, "layer_norm": layer_norm, "bias_gelu": bias_gelu, "linear": linear},
    )


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

"""The choice of kernels: the fastest that runs here, or exactly the one asked for."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.attention import SdpaAttention, reference_attention, why_varlen_cannot_run
from ctxlm_ds.kernels.bias_gelu import CompiledBiasGelu, ReferenceBiasGelu, why_compiled_cannot_run
from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.kernels.layer_norm import reference_layer_norm
from ctxlm_ds.kernels.linear import bf16_is_emulated, float32_linear, torch_linear
from ctxlm_ds.recipe.schema import KernelsConfig

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without CUDA answers")


def test_fp32_on_the_cpu_takes_torchs_kernels_and_says_so() -> None:
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, packing=False)
    assert kernels.describe() == "attention sdpa, layer_norm torch, bias_gelu torch, linear torch"
    assert isinstance(kernels.attention, SdpaAttention) and not kernels.attention.packing
    assert not kernels.attention.compute_in_float32


def test_packed_rows_take_the_mask_between_sequences() -> None:
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, packing=True)
    assert isinstance(kernels.attention, SdpaAttention) and kernels.attention.packing


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_causal_attention_hides_later_positions(name: str) -> None:
    config = KernelsConfig.model_validate({"attention": name})
    kernels = choose_kernels(config, "cpu", torch.float32, packing=False, causal=True)
    value = torch.randn(1, 4, 1, 8, generator=torch.Generator().manual_seed(0))
    ids, starts = torch.ones(1, 4, dtype=torch.int64), torch.tensor([[0, 4]])
    context = kernels.attention(value, value, value, ids, starts, 0.0)
    assert torch.equal(context[:, 0], value[:, 0])


def test_bf16_on_a_cpu_without_bf16_units_computes_in_float32() -> None:
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.bfloat16, packing=False)
    emulated = bf16_is_emulated("cpu")
    assert kernels.linear is (float32_linear if emulated else torch_linear)
    assert isinstance(kernels.attention, SdpaAttention) and kernels.attention.compute_in_float32 == emulated
    assert kernels.bias_gelu.linear is kernels.linear
    assert not bf16_is_emulated("cuda")


def test_references_by_name() -> None:
    config = KernelsConfig(attention="reference", layer_norm="reference", bias_gelu="reference", linear="float32")
    kernels = choose_kernels(config, "cpu", torch.float32, packing=True)
    assert kernels.attention.func is reference_attention and kernels.layer_norm is reference_layer_norm
    assert isinstance(kernels.bias_gelu, ReferenceBiasGelu) and kernels.linear is float32_linear
    assert kernels.describe() == "attention reference, layer_norm reference, bias_gelu reference, linear float32"


@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
def test_compiled_by_name() -> None:
    kernels = choose_kernels(KernelsConfig(bias_gelu="compiled"), "cpu", torch.float32, packing=False)
    assert isinstance(kernels.bias_gelu, CompiledBiasGelu)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KernelsConfig(attention="varlen"), r"kernels\.attention: `varlen` cannot run here: it needs a CUDA device"),
        (KernelsConfig(layer_norm="apex"), r"kernels\.layer_norm: `apex` cannot run here: it needs a CUDA device"),
    ],
)
def test_a_kernel_asked_for_by_name_that_cannot_run_is_an_error(config: KernelsConfig, message: str) -> None:
    with pytest.raises(KernelError, match=message) as error:
        choose_kernels(config, "cpu", torch.float32, packing=False)
    assert "Set kernels." in str(error.value)


@no_cuda
def test_the_apex_of_pypi_does_not_count() -> None:
    with pytest.raises(KernelError, match="build NVIDIA apex from source"):
        choose_kernels(KernelsConfig(layer_norm="apex"), "cuda", torch.bfloat16, packing=False)


def test_no_cpp_compiler_is_a_reason() -> None:
    from torch._inductor import config as inductor

    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(KernelError, match=r"`compiled` cannot run here: .*C\+\+ compiler"),
    ):
        choose_kernels(KernelsConfig(bias_gelu="compiled"), "cpu", torch.float32, packing=False)


@pytest.mark.parametrize(
    ("dtype", "dropout", "head_size", "capability", "reason"),
    [
        (torch.bfloat16, 0.0, 64, (8, 0), None),
        (torch.float16, 0.0, 256, (9, 0), None),
        (torch.float32, 0.0, 64, (8, 0), "bf16 or fp16"),
        (torch.bfloat16, 0.1, 64, (8, 0), "no attention dropout"),
        (torch.bfloat16, 0.0, 260, (8, 0), "at most 256"),
        (torch.bfloat16, 0.0, 36, (8, 0), "multiple of 8"),
        (torch.bfloat16, 0.0, 64, (7, 5), "Ampere"),
    ],
)
def test_what_varlen_needs(
    dtype: torch.dtype, dropout: float, head_size: int, capability: tuple[int, int], reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    answer = why_varlen_cannot_run("cuda", dtype, dropout, head_size)
    assert answer is None if reason is None else answer is not None and reason in answer
    chosen = choose_kernels(KernelsConfig(), "cuda", dtype, True, attention_dropout=dropout, head_size=head_size)
    assert chosen.names["attention"] == ("varlen" if reason is None else "sdpa")
    assert choose_kernels(KernelsConfig(), "cuda", dtype, packing=False).names["attention"] == "sdpa"

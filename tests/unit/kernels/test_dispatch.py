"""The choice of kernels: the preferred one that suits and runs, or exactly the one asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.attention import ReferenceAttention, SdpaAttention, why_varlen_cannot_run
from ctxlm_ds.kernels.attention_bmm import BmmAttention
from ctxlm_ds.kernels.attention_spec import AttentionSpec
from ctxlm_ds.kernels.bias_gelu import compiled_bias_gelu, reference_bias_gelu
from ctxlm_ds.kernels.dispatch import OPERATIONS, KernelSet
from ctxlm_ds.kernels.implementation import Implementation, Need, why_compiled_cannot_run
from ctxlm_ds.kernels.linear import bf16_is_emulated, float32_linear, torch_linear
from ctxlm_ds.kernels.norm import reference_layer_norm, reference_rms_norm
from ctxlm_ds.recipe.schema import KernelsConfig
from ctxlm_ds.registry import KERNELS

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without CUDA answers")
SINGLE, PACKED = AttentionSpec(64), AttentionSpec(64, shares_rows=True)
ON_CPU = Need(SINGLE, "cpu", torch.float32)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_recipe_can_name_every_implementation_and_no_other(operation: str) -> None:
    names = [row.name for row in OPERATIONS[operation]]
    assert {"auto", *names} == set(KernelsConfig.model_fields[operation].metadata[0].func.others)
    assert len(set(names)) == len(names)


def test_every_setting_but_the_optimizers_has_a_table() -> None:
    assert set(KernelsConfig.model_fields) - {"optimizer"} == set(OPERATIONS)


def test_a_registered_implementation_is_taken_by_name_only() -> None:
    mine = object()
    KERNELS.register("linear.mine", Implementation("ours", lambda need: mine))
    assert KernelSet({"linear": "mine"}, "cpu", torch.float32).linear is mine
    assert "linear mine" in KernelSet({"linear": "mine"}, "cpu", torch.float32).describe()
    assert KernelSet({}, "cpu", torch.float32).linear is torch_linear
    with pytest.raises(ValidationError, match="expected one of auto, torch, float32, mine"):
        KernelsConfig(linear="yours")


def test_fp32_on_the_cpu_takes_torchs_kernels_and_says_so() -> None:
    kernels = KernelSet({}, "cpu", torch.float32)
    assert kernels.describe() == "layer_norm torch, bias_gelu torch, linear torch, dropout loop"
    assert kernels.attention(SINGLE) == SdpaAttention(SINGLE, in_float32=False)
    assert kernels.attention(PACKED) == SdpaAttention(PACKED, long_rows=BmmAttention(PACKED))
    assert kernels.describe() == "attention sdpa, layer_norm torch, bias_gelu torch, linear torch, dropout loop"


def test_layers_of_one_kind_share_their_kernel() -> None:
    kernels = KernelSet({}, "cpu", torch.float32)
    assert kernels.attention(SINGLE) is kernels.attention(AttentionSpec(64))
    assert kernels.attention(SINGLE) is not kernels.attention(PACKED)


def test_bf16_on_a_cpu_without_bf16_units_computes_in_float32() -> None:
    kernels = KernelSet({}, "cpu", torch.bfloat16)
    emulated = bf16_is_emulated("cpu")
    assert kernels.linear is (float32_linear if emulated else torch_linear)
    long_rows = SdpaAttention(SINGLE, in_float32=emulated)
    assert kernels.attention(SINGLE) == BmmAttention(SINGLE, in_float32=emulated, long_rows=long_rows)
    assert not bf16_is_emulated("cuda")


def test_dropout_of_attention_on_the_cpu_is_by_key() -> None:
    kernels = KernelSet({}, "cpu", torch.float32)
    kernels.attention(AttentionSpec(64, dropout=0.1))
    assert kernels.names["attention"] == "bmm"


def test_references_by_name() -> None:
    config = KernelsConfig(attention="reference", layer_norm="reference", bias_gelu="reference", linear="float32")
    kernels = KernelSet(dict(config), "cpu", torch.float32)
    assert kernels.attention(PACKED) == ReferenceAttention(PACKED) and kernels.layer_norm is reference_layer_norm
    assert kernels.bias_gelu is reference_bias_gelu and kernels.linear is float32_linear
    assert kernels.rms_norm is reference_rms_norm
    assert kernels.describe() == (
        "attention reference, layer_norm reference, bias_gelu reference, linear float32, dropout loop"
    )


@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
def test_compiled_by_name() -> None:
    kernels = KernelSet({"bias_gelu": "compiled"}, "cpu", torch.float32)
    assert kernels.bias_gelu is compiled_bias_gelu


def test_attention_asked_for_by_name_that_cannot_run_is_an_error() -> None:
    kernels = KernelSet({"attention": "varlen"}, "cpu", torch.float32)
    message = (
        r"kernels\.attention: `varlen` cannot run here: it needs a CUDA device, and this run is on cpu\. "
        r"Set kernels\.attention to `auto` \(`sdpa` here\)\."
    )
    with pytest.raises(KernelError, match=message):
        kernels.attention(PACKED)


@no_cuda
def test_the_apex_of_pypi_does_not_count() -> None:
    with pytest.raises(KernelError, match="build NVIDIA apex from source"):
        KernelSet({"layer_norm": "apex"}, "cuda", torch.bfloat16)


def test_no_cpp_compiler_is_a_reason() -> None:
    from torch._inductor import config as inductor

    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(KernelError, match=r"`compiled` cannot run here: .*C\+\+ compiler"),
    ):
        KernelSet({"bias_gelu": "compiled"}, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "varlen"),
        (dict(dropout=0.1), "varlen"),
        (dict(causal=True), "sdpa"),
        (dict(causal=True, shares_rows=True), "varlen"),
        (dict(causal=True, window=8), "varlen"),
        (dict(cross=True), "sdpa"),
    ],
)
def test_attention_without_a_mask_on_cuda(
    settings: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` takes bounds of sequences where the other kernels would read a mask of padding or of sequences."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    kernels = KernelSet({}, "cuda", torch.bfloat16)
    kernels.attention(AttentionSpec(64, **settings))
    assert kernels.names["attention"] == expected


@pytest.mark.parametrize(
    ("dtype", "settings", "capability", "reason"),
    [
        (torch.bfloat16, {}, (8, 0), None),
        (torch.float16, dict(head_size=256), (9, 0), None),
        (torch.bfloat16, dict(causal=True, window=128, grouped=True, scale=1.0), (8, 0), None),
        (torch.bfloat16, dict(cross=True), (8, 0), None),
        (torch.float32, {}, (8, 0), "bf16 or fp16"),
        (torch.bfloat16, dict(dropout=0.1), (8, 0), None),
        (torch.bfloat16, dict(bias=True), (8, 0), "adds no bias"),
        (torch.bfloat16, dict(head_size=260), (8, 0), "at most 256"),
        (torch.bfloat16, dict(head_size=36), (8, 0), "multiple of 8"),
        (torch.bfloat16, {}, (7, 5), "Ampere"),
    ],
)
def test_what_varlen_needs(
    dtype: torch.dtype, settings: dict[str, Any], capability: tuple[int, int], reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    spec = AttentionSpec(**{"head_size": 64, "shares_rows": True, **settings})
    kernels = KernelSet({}, "cuda", dtype)
    kernels.attention(spec)
    kernels.attention(AttentionSpec(64, causal=True))
    if reason is None:
        assert why_varlen_cannot_run(Need(spec, "cuda", dtype)) is None
        assert kernels.names["attention"] == "sdpa and varlen"
        KernelSet({"attention": "varlen"}, "cuda", dtype).attention(SINGLE)
        return
    assert kernels.names["attention"] == "sdpa"
    with pytest.raises(KernelError, match=reason):
        KernelSet({"attention": "varlen"}, "cuda", dtype).attention(spec)

"""The rows of Triton's kernels: why one cannot run, what is loaded when one is asked for, and which `auto` takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels import bias_gelu
from ctxlm_ds.kernels.attention_spec import AttentionSpec
from ctxlm_ds.kernels.dispatch import OPERATIONS, KernelSet
from ctxlm_ds.kernels.implementation import Need
from ctxlm_ds.kernels.triton import rows
from ctxlm_ds.kernels.triton.rows import ROWS, Figure, measured, why_triton_cannot_run, wins

ON_CUDA = Need(None, "cuda", torch.bfloat16)


def test_a_run_on_a_cpu_names_the_reason() -> None:
    with pytest.raises(KernelError, match="`triton` cannot run here: it needs a CUDA device, and this run is on cpu"):
        KernelSet({"dropout": "triton"}, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((9, 0), torch.bfloat16, None),
        ((7, 5), torch.float16, None),
        ((7, 5), torch.bfloat16, "compute capability 8.0 or later, and this device has 7.5"),
        ((7, 0), torch.float32, "compute capability 7.5 or later"),
        ((9, 0), torch.float64, "bf16, fp16 or fp32 only"),
    ],
)
def test_the_device_and_the_type_decide(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = why_triton_cannot_run(Need(None, "cuda", dtype))
    assert found is None if reason is None else reason in str(found)


def test_an_installation_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install triton" in str(why_triton_cannot_run(Need(None, "cuda", torch.float32)))


@pytest.mark.parametrize("operation", ROWS)
def test_each_row_loads_its_kernel(operation: str) -> None:
    assert ROWS[operation].make(Need(None, "cuda", torch.bfloat16)) is not None


def test_gated_activations_alone_have_a_kernel() -> None:
    from ctxlm_ds.kernels.triton.activation import triton_gated

    make = ROWS["bias_gelu"].make
    assert make(Need(bias_gelu.GATED, "cuda", torch.bfloat16)) is triton_gated
    assert make(Need(None, "cuda", torch.bfloat16)) is bias_gelu.torch_bias_gelu


@pytest.mark.parametrize(
    ("capability", "spec", "reason"),
    [
        ((8, 0), AttentionSpec(64, bias=True), None),
        ((12, 0), AttentionSpec(128, causal=True, window=3, grouped=True), None),
        ((7, 5), AttentionSpec(64), "before compute capability 8.0"),
        ((9, 0), AttentionSpec(80), "heads must be 64 or 128 wide, and they are 80"),
        ((9, 0), AttentionSpec(64, ranked=True), "this model's attention by their rank"),
    ],
)
def test_attention_needs_matrix_units_and_heads_of_a_tile(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], spec: AttentionSpec, reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = ROWS["attention"].why_not(Need(spec, "cuda", torch.float16))
    assert found is None if reason is None else reason in str(found)


def test_auto_takes_attention_for_a_bias_and_by_figures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    figure = Figure("attention", "triton", "9.0", "bfloat16", (1,), 1.0, 2.0, "2.13.0", "3.7.1", "H100")
    biased, dropped = AttentionSpec(64, bias=True), AttentionSpec(64, dropout=0.1)
    for known, taken in (((figure,), True), ((), False)):
        monkeypatch.setattr(rows, "measured", lambda path, known=known: known)
        suits = [ROWS["attention"].suits(Need(spec, "cuda", torch.bfloat16)) for spec in (biased, dropped)]
        assert suits == [taken, False]


def figure(**changed: Any) -> dict[str, Any]:
    known = {
        "operation": "dropout", "row": "triton", "capability": "9.0", "dtype": "bfloat16", "shape": [16384, 1024],
        "microseconds": 20.0, "torch_microseconds": 60.0, "torch": "2.13.0", "triton": "3.7.1", "card": "H100",
    }  # fmt: skip
    return {**known, **changed}


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], True),
        ([{"microseconds": 61.0, "shape": [128, 64]}], False),
        ([{"microseconds": 61.0, "dtype": "float32"}, {"microseconds": 61.0, "capability": "8.0"}], True),
    ],
)
def test_a_row_wins_where_each_shape_of_this_device_and_type_was_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others: list[dict[str, Any]], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    path = tmp_path / "figures.json"
    path.write_text(json.dumps([figure(), *(figure(**other) for other in others)]), encoding="utf-8")
    assert wins("dropout", "triton", ON_CUDA, path) is expected
    assert not wins("cross_entropy", "triton", ON_CUDA, path)
    assert not wins("dropout", "triton", Need(None, "cpu", torch.bfloat16), path)


def test_shipped_figures_name_rows_of_the_tables() -> None:
    for found in measured():
        assert found.row in {row.name for row in OPERATIONS[found.operation]}
        assert found.microseconds > 0 and found.torch_microseconds > 0

"""Measured figures decide which kernel `auto` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.kernels import figures
from ctxlm_ds.kernels.dispatch import OPERATIONS
from ctxlm_ds.kernels.implementation import Need

ON_CUDA = Need(None, "cuda", torch.bfloat16)


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
    assert figures.wins("dropout", "triton", ON_CUDA, path) is expected
    assert not figures.wins("cross_entropy", "triton", ON_CUDA, path)
    assert not figures.wins("dropout", "triton", Need(None, "cpu", torch.bfloat16), path)


def test_shipped_figures_name_rows_of_the_tables() -> None:
    for found in figures.measured():
        assert found.row in {row.name for row in OPERATIONS[found.operation]}
        assert found.microseconds > 0 and found.torch_microseconds > 0

"""What crosses a pipeline's cut arrives bit for bit."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.models.layers import Flow
from ctxlm_ds.training.engine.pipeline import _pack, _unpack
from tests.unit.models.test_layers import layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_crosses_a_cut_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    names = ("exact", "half", "flag", "long", "short")
    flow = Flow([layer("0", "ids", "a " + " ".join(names), no_gradient=frozenset(names)),
                 layer("1", "a " + " ".join(names), "b")], ["b"])  # fmt: skip
    tensors = {
        "a": torch.randn(2, 3).t(), "exact": torch.randn(3, 2).t(), "half": torch.randn(4).to(dtype),
        "flag": torch.tensor([True, False]), "long": torch.tensor([1 << 40]),
        "short": torch.tensor([-7], dtype=torch.int16),
    }  # fmt: skip
    tensors["exact"][0, 0] = float("nan")
    packed = _pack(tensors, flow.before(1))
    assert all(x.is_contiguous() for x in packed)
    assert [x.is_floating_point() for x in packed] == [True] + [False] * 5
    arrived = _unpack(packed, flow.before(1), dtype)
    for name, tensor in tensors.items():
        assert torch.equal(arrived[name].nan_to_num(), tensor.nan_to_num()), name
        assert arrived[name].dtype == (torch.int64 if name in ("long", "short") else tensor.dtype)

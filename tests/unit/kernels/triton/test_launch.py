"""Operators on tensors without data, and the launches that are kept."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ctxlm_ds.kernels.triton.dropout import dropout_kernel
from ctxlm_ds.kernels.triton.dropout import keyed_dropout as triton_dropout
from ctxlm_ds.kernels.triton.launch import recorded


def test_fake_tensors_get_shapes_and_gradients_and_start_nothing() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 5, dtype=torch.bfloat16, requires_grad=True)
        key = torch.zeros((), dtype=torch.int64)
        out = triton_dropout(x, 0.1, key)
        assert out.shape == x.shape and out.dtype == x.dtype
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert gradient.shape == x.shape


def test_launches_are_kept_inside_the_context_only() -> None:
    x, key = torch.empty(4096, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
    with recorded() as launches:
        triton_dropout(x, 0.5, key, 8)
    triton_dropout(x, 0.5, key)
    (one,) = launches
    assert one.kernel is dropout_kernel and one.grid == (2,)
    assert one.arguments["x"] is x
    assert {name: one.arguments[name] for name in ("size", "first", "threshold", "factor", "BLOCK")} == {
        "size": 4096, "first": 8, "threshold": 1 << 15, "factor": 2.0, "BLOCK": 2048,
    }  # fmt: skip


def test_a_compiled_function_keeps_the_operator() -> None:
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(str(graph.graph))
        return graph

    x, key = torch.empty(3, 5, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
    torch.compile(lambda x: triton_dropout(x + 1, 0.5, key), backend=keep, fullgraph=True)(x)
    assert "ctxlm.keyed_dropout" in graphs[0]

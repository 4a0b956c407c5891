"""What later families need has room: each toy learns the same in every layout as in plain torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.dist.runner import run_ranks
from tests.dist.states import Layout
from tests.families.toy_runs import train, train_plain

pytestmark = pytest.mark.dist
TENSOR, DATA_3, DATA_2 = Layout(2, 0, tensor=2), Layout(2, 3), Layout(2, 2)
PIPE_2, PIPE_4, BOTH = Layout(2, 1, pipeline=2), Layout(4, 0, pipeline=4), Layout(4, 1, tensor=2, pipeline=2)
LAYOUTS = {
    "encoder_decoder": [TENSOR, DATA_3, PIPE_2, PIPE_4],
    "shared_layer": [DATA_3, Layout(2, 0, pipeline=2), PIPE_4, BOTH],
    "half_used": [DATA_2, Layout(2, 0, pipeline=2), PIPE_2, BOTH],
    "two_streams": [TENSOR, PIPE_2, PIPE_4],
    "without_gradient": [DATA_2, PIPE_2, PIPE_4],
    "distillation": [TENSOR, DATA_3, PIPE_2, BOTH, Layout(4, 1, pipeline=2)],
    "generator": [TENSOR, DATA_3, PIPE_4, BOTH],
    "lanes": [TENSOR, DATA_3, PIPE_2, BOTH],
    "chunked": [TENSOR, DATA_3, PIPE_2],
}
CASES = [(name, Layout(1, 0)) for name in LAYOUTS] + [(name, where) for name, some in LAYOUTS.items() for where in some]


@cache
def plain_run(name: str) -> dict[str, Any]:
    return run_ranks(train_plain, 1, name, timeout_s=60)[0]


@cache
def run_under(name: str, layout: Layout, recompute: bool = False) -> list[dict[str, Any]]:
    return run_ranks(train, layout.world_size, name, layout, recompute, timeout_s=120)


def assert_alike(run: dict[str, Any], wanted: dict[str, Any], rel: float = 1e-5) -> None:
    assert run["losses"] == pytest.approx(wanted["losses"], rel=rel)
    assert run["norms"] == pytest.approx(wanted["norms"], rel=rel)
    assert run["gradients"].keys() >= wanted["gradients"].keys()
    for name, gradient in wanted["gradients"].items():
        torch.testing.assert_close(run["gradients"][name], gradient, rtol=rel, atol=rel, msg=name)


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_every_layout_learns_what_plain_torch_does(name: str, layout: Layout) -> None:
    recompute = layout.pipeline > 1
    run = run_under(name, layout, recompute)[0]
    assert_alike(run, plain_run(name))
    single = run_under(name, Layout(1, 0))[0]
    assert run["evaluation"] == pytest.approx(single["evaluation"], rel=1e-5)
    for terms, wanted in zip(run["terms"], single["terms"], strict=True):
        assert terms == pytest.approx(wanted, rel=1e-5)

"""What no shipped family needs has room: each toy learns the same in every layout as in plain torch."""

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
    "half_used": [DATA_2, PIPE_2, BOTH],
    "two_streams": [TENSOR, PIPE_2, PIPE_4],
    "without_gradient": [DATA_2, PIPE_2, PIPE_4],
    "lanes": [DATA_3, BOTH],
}
CASES = [(name, Layout(1, 0)) for name in LAYOUTS] + [(name, where) for name, some in LAYOUTS.items() for where in some]
OF_PARTS = [("half_used", Layout(2, 0, pipeline=2)), ("lanes", TENSOR), ("lanes", PIPE_2)]
"""Layouts of which others have every part."""


def recomputes(layout: Layout) -> bool:
    return layout.pipeline > 1 or layout.stage == 3


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


@pytest.mark.parametrize(
    ("name", "layout"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in OF_PARTS)], ids=str
)
def test_every_layout_learns_what_plain_torch_does(name: str, layout: Layout) -> None:
    run = run_under(name, layout, recomputes(layout))[0]
    assert_alike(run, plain_run(name))
    single = run_under(name, Layout(1, 0))[0]
    assert run["evaluation"] == pytest.approx(single["evaluation"], rel=1e-5)
    for terms, wanted in zip(run["terms"], single["terms"], strict=True):
        assert terms == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("layout", [Layout(1, 0), PIPE_2, PIPE_4], ids=str)
def test_a_layer_runs_once_and_once_more_to_be_recomputed(layout: Layout) -> None:
    """Also if several floating tensors leave its stage: DeepSpeed's own instruction goes backward once for each."""
    for recompute in (False, True):
        counted: dict[str, int] = {}
        for run in run_under("two_streams", layout, recompute):
            counted |= run["forwards"]
        # Four micro-batches.
        assert counted == {str(index): 4 * (1 + recompute) for index in range(4)}


@pytest.mark.parametrize("name", ["without_gradient", "lanes"])
def test_bf16_in_a_pipeline(name: str) -> None:
    wanted = run_under(name, Layout(1, 1, "bf16"))[0]
    run = run_under(name, Layout(2, 1, "bf16", pipeline=2), True)[0]
    # Of a tied weight each stage rounds its own gradient.
    assert run["losses"] == pytest.approx(wanted["losses"], rel=1e-3)
    assert wanted["losses"] == pytest.approx(plain_run(name)["losses"], rel=3e-2)


@pytest.mark.parametrize("layout", LAYOUTS["half_used"], ids=str)
def test_copies_of_a_tied_module_stay_equal_if_a_stage_does_not_use_all_of_it(layout: Layout) -> None:
    tables: dict[str, dict[str, torch.Tensor]] = {}
    for run in run_under("half_used", layout, recomputes(layout)):
        for name, value in run["tied"].items():
            first = tables.setdefault(run["tensor_rank"], {}).setdefault(name, value)
            assert torch.equal(first, value)
    assert all(values.keys() == {"word_embeddings.weight", "word_embeddings.scale"} for values in tables.values())
    assert not all(bool((values["word_embeddings.scale"] == 1).all()) for values in tables.values())

"""What later families need has room: each toy learns the same in every layout as in plain torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import Flow, LayerDescription
from ctxlm_ds.models.program import Program, build_program
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.models.stages import plan_stages
from ctxlm_ds.recipe.schema import ParallelConfig
from ctxlm_ds.registry import FAMILIES
from tests.dist.runner import run_ranks
from tests.dist.states import Layout
from tests.families.toy_runs import TOYS, config_of, register_toys, train, train_plain

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


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
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


@pytest.mark.parametrize("name", ["encoder_decoder", "without_gradient", "distillation", "lanes"])
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


@pytest.mark.parametrize("layout", [Layout(1, 0), *LAYOUTS["distillation"]], ids=str)
def test_a_teacher_is_never_changed_and_in_no_checkpoint(layout: Layout) -> None:
    stages: dict[int, set[str]] = {}
    for run in run_under("distillation", layout, recomputes(layout)):
        assert not any(name.startswith("teacher.") for name in run["names"])
        assert run["unchanged"]
        for share, wanted in run["frozen"].values():
            assert torch.equal(share, wanted)
        stages.setdefault(run["stage"], set()).update(run["frozen"])
    names = set().union(*stages.values())
    assert {name.split(".")[1] for name in names} == {"word_embeddings", "layer"} and len(names) == 1 + 3 * 12


def test_the_generator_draws_the_same_words_in_every_layout() -> None:
    """Its labels are an output of the model; accuracy of their prediction counts the same ones."""
    single = run_under("generator", Layout(1, 0))[0]
    assert 0 < single["terms"][0]["discriminator_accuracy"] < 1
    assert single["losses"][0] == pytest.approx(
        single["terms"][0]["generator"] + 50 * single["terms"][0]["discriminator"], rel=1e-6
    )


@pytest.mark.parametrize("layout", [Layout(1, 0), *LAYOUTS["chunked"]], ids=str)
def test_a_chunked_comparison_is_the_usual_one(layout: Layout) -> None:
    run, usual = run_under("chunked", layout, recomputes(layout))[0], run_under("usual", layout)[0]
    assert_alike(run, usual, rel=1e-6)
    for terms, wanted in zip(run["terms"], usual["terms"], strict=True):
        assert terms == pytest.approx(wanted, rel=1e-6)


def test_a_relative_bias_crosses_no_cut() -> None:
    layers, bounds = plan("encoder_decoder", ParallelConfig(pipeline_parallel_size=4))
    flow = Flow(layers, ("logits",))
    crossing = [flow.before(start) for start in bounds[1:-1]]
    assert [at.with_gradient for at in crossing] == [("memory",), ("hidden", "memory"), ("hidden", "memory")]
    assert [at.without_gradient for at in crossing] == [
        ("decoder_ids", "input_ids"), ("decoder_ids",), ("decoder_ids",),
    ]  # fmt: skip


def test_a_stage_of_a_teacher_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="stage 0 would hold only layers of a teacher"):
        plan("distillation", ParallelConfig(pipeline_parallel_size=2, pipeline_layers=[2, 3]))


def plan(name: str, layout: ParallelConfig) -> tuple[list[LayerDescription], list[int]]:
    """List a toy's layers and cut them."""
    outputs = TOYS[name].outputs
    build = ModelBuild(outputs, KernelSet({}, "cpu", torch.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FAMILIES, "_added", {})
        patch.setattr(FAMILIES, "_loaded", {})
        register_toys()
        layers = build_program(config_of(name, Layout(1, 0)).model, build).layers
    return layers, plan_stages(layout, layers, Program(layers, outputs).trained_shapes)

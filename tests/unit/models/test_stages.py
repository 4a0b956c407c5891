"""Where a pipeline is cut: the dearest stage is as cheap as any cut can make it."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerDescription, LayerSequence, ModelBuild
from ctxlm_ds.models.parts.distillation import teacher_layers
from ctxlm_ds.models.program import build_program
from ctxlm_ds.models.stages import bounds_of_counts, parameter_costs, plan_stages, stage_bounds
from ctxlm_ds.recipe.schema import ParallelConfig
from ctxlm_ds.registry import OBJECTIVES
from tests.dist.training import tiny_config


def layers(num_blocks: int, before: int = 2, after: int = 3) -> list[LayerDescription]:
    names = [*(f"first{i}" for i in range(before)), *(f"encoder.{i}" for i in range(num_blocks))]
    names += [f"last{i}" for i in range(after)]
    return [LayerDescription(name, nn.Identity, ("x",), ("x",), block=name.startswith("encoder.")) for name in names]


def cheapest(costs: list[float], descriptions: list[LayerDescription], num_stages: int) -> float:
    """The dearest stage of the best of all cuts before blocks, the first block's stage having what precedes it."""
    blocks = [index for index, description in enumerate(descriptions) if description.block]
    cuts = itertools.combinations(blocks[1:], num_stages - 1)
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cut, len(costs)])) for cut in cuts)


@given(
    blocks=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8),
    ends=st.tuples(*[st.floats(0.0, 30.0)] * 5),
    num_stages=st.integers(1, 8),
)
def test_no_cut_has_a_cheaper_dearest_stage(blocks: list[float], ends: tuple[float, ...], num_stages: int) -> None:
    descriptions = layers(len(blocks))
    costs = [*ends[:2], *blocks, *ends[2:]]
    if num_stages > len(blocks):
        with pytest.raises(ConfigError, match=f"{num_stages} stages for {len(blocks)} transformer layers"):
            stage_bounds(descriptions, costs, num_stages)
        return
    bounds = stage_bounds(descriptions, costs, num_stages)
    stages = list(itertools.pairwise(bounds))
    assert (bounds[0], bounds[-1], len(stages)) == (0, len(costs), num_stages)
    assert all(any(d.block for d in descriptions[a:b]) for a, b in stages)
    dearest = max(sum(costs[a:b]) for a, b in stages)
    assert dearest == pytest.approx(cheapest(costs, descriptions, num_stages), rel=1e-9)


def test_by_hand() -> None:
    assert bounds_of_counts(layers(6), [1, 2, 3]) == [0, 3, 5, 11]
    for counts in ([3, 2], [6, 0], [3, 4]):
        with pytest.raises(ConfigError, match="pipeline_layers"):
            bounds_of_counts(layers(6), counts)


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "gpt1"])
def test_parameters_are_those_of_the_modules(family: str) -> None:
    """The tied word embedding counts where it looks up and where it decodes."""
    config = tiny_config(family)
    outputs = OBJECTIVES.get(config.objective.name).outputs
    kernels = KernelSet(dict(config.kernels), "cpu", torch.float32)
    descriptions = build_program(config.model, ModelBuild(outputs, kernels)).layers
    model = LayerSequence(descriptions, outputs)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expected = [float(sum(p.numel() for p in module.parameters())) for _, module, _ in model._steps]
    assert parameter_costs(descriptions, shapes) == expected


def best_counts(costs: list[int], num_stages: int) -> tuple[int, list[int]]:
    """The cost of the dearest part and the sizes of the parts, by trying every start of the last part."""
    if num_stages == 1:
        return sum(costs), [len(costs)]
    found = []
    for start in range(num_stages - 1, len(costs)):
        dearest, counts = best_counts(costs[:start], num_stages - 1)
        found.append((max(dearest, sum(costs[start:])), start, [*counts, len(costs) - start]))
    cost, _, counts = min(found)
    return cost, counts


@given(blocks=st.lists(st.integers(0, 5), min_size=1, max_size=9), num_stages=st.integers(1, 9))
def test_of_equally_good_cuts_earlier_stages_have_fewer_blocks(blocks: list[int], num_stages: int) -> None:
    num_stages = min(num_stages, len(blocks))
    descriptions = layers(len(blocks), before=0, after=0)
    expected = bounds_of_counts(descriptions, best_counts(blocks, num_stages)[1])
    assert stage_bounds(descriptions, [float(cost) for cost in blocks], num_stages) == expected


def test_ten_thousand_layers_are_cut_at_once() -> None:
    descriptions = layers(10_000)
    shapes = {f"{layer.name}.weight": (8, 8) for layer in descriptions}
    started_s = time.process_time()
    bounds = stage_bounds(descriptions, parameter_costs(descriptions, shapes), 64)
    assert time.process_time() - started_s < 10
    assert max(stop - start for start, stop in itertools.pairwise(bounds)) <= 157 + 3


def test_a_layer_that_each_stage_runs_once_goes_with_its_block() -> None:
    bias = LayerDescription("bias", nn.Identity, ("x",), ("bias",), tie_key="bias", once=True)
    plain = layers(4, before=1, after=1)
    descriptions = [part for layer in plain for part in ((bias, layer) if layer.block else (layer,))]
    assert bounds_of_counts(descriptions, [2, 1, 1]) == [0, 5, 7, 10]
    assert stage_bounds(descriptions, [float(layer.block) for layer in descriptions], 2) == [0, 5, 10]


def test_a_stage_of_a_teacher_alone_is_refused() -> None:
    descriptions = [*teacher_layers(layers(3)), *layers(2)]
    shapes = {f"{layer.name}.weight": (8, 8) for layer in layers(2)}
    cut = ParallelConfig(pipeline_parallel_size=2, pipeline_layers=[2, 3])
    with pytest.raises(ConfigError, match="stage 0 would hold only layers of a teacher"):
        plan_stages(cut, descriptions, shapes)

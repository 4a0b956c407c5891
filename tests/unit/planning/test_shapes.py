"""The planned layers are the built ones: names, shapes, order, and without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_layer_list
from ctxlm_ds.models.flops import parameter_count
from ctxlm_ds.objectives.build import objective_terms as built_terms
from ctxlm_ds.planning.shapes import layer_list, objective_terms, with_vocabulary
from ctxlm_ds.recipe.load import load_config, shipped_recipes
from ctxlm_ds.recipe.schema import KernelsConfig, RunConfig

SMALL = {"hidden_size": 32, "num_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
MODELS: list[dict[str, Any]] = [
    {"family": "bert"},
    {"family": "bert", "pre_layer_norm": True},
    {"family": "roberta"},
    {"family": "gpt2"},
    {"family": "gpt1"},
]


def config_of(model: dict[str, Any]) -> RunConfig:
    name = {"bert": "masked_lm_nsp", "roberta": "masked_lm"}.get(model["family"], "causal_lm")
    return RunConfig.model_validate({"model": SMALL | model, "objective": {"name": name}})


@pytest.mark.parametrize("model", MODELS)
def test_the_planned_layers_are_the_built_ones(model: dict[str, Any]) -> None:
    config = config_of(model)
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, False)
    built = build_layer_list(config.model, built_terms(config.objective), kernels)
    planned = layer_list(config)
    assert [(layer.name, layer.block) for layer in planned] == [(layer.name, layer.block) for layer in built]
    with torch.device("meta"):
        modules = [layer.build() for layer in built]
    for layer, module in zip(planned, modules, strict=True):
        shapes = {f"{layer.name}.{name}": tuple(p.shape) for name, p in module.named_parameters()}
        assert dict(layer.shapes) == shapes


@pytest.mark.parametrize("model", MODELS)
def test_the_planned_parameters_add_up_to_the_counted_ones(model: dict[str, Any]) -> None:
    config = config_of(model)
    named = {name: layer for layer in layer_list(config) for name, _ in layer.shapes}
    total = sum(layer.num_elements for layer in {layer.name: layer for layer in named.values()}.values())
    assert total == parameter_count(config.model, objective_terms(config))


def test_every_shipped_recipe_has_its_objectives_terms_and_a_vocabulary() -> None:
    for name in shipped_recipes():
        config = load_config(name)
        assert objective_terms(config) == built_terms(config.objective)
        assert (with_vocabulary(config.model).vocab_size or 0) > 10_000 or config.model.vocab_size


def test_planning_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, ctxlm_ds.planning.published, ctxlm_ds.planning.report, ctxlm_ds.planning.search; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'deepspeed', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

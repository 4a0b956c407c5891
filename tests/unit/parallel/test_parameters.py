"""Facts of parameters: declared where they are made, found by full name, also after copies."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.parallel.parameters import ONES, ZEROS, Normal, ParameterFacts, collect_facts, declare, fix_others, freeze
from tests.sections import model_section

WEIGHT, BIAS = ParameterFacts(Normal(0.02), decays=True), ParameterFacts(ZEROS, decays=False)


def part() -> nn.Linear:
    made = nn.Linear(2, 3)
    declare(made, weight=WEIGHT)
    declare(made, bias=BIAS)
    return made


def test_facts_are_found_by_full_name_in_the_order_of_the_parameters() -> None:
    model = nn.Sequential(part(), nn.Sequential(part()))
    model.scale = nn.Parameter(torch.ones(()))
    declare(model, scale=ParameterFacts(ONES, decays=False))
    found = collect_facts(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert (found["0.weight"], found["1.0.bias"], found["scale"].init) == (WEIGHT, BIAS, ONES)


def test_copies_and_new_tensors_keep_them() -> None:
    with torch.device("meta"):
        model = nn.Sequential(part())
    expected = collect_facts(model)
    real = copy.deepcopy(model).to_empty(device="cpu")
    real[0].weight = nn.Parameter(torch.zeros(3, 2))
    assert collect_facts(real) == expected


def test_a_module_that_is_tied_is_named_once() -> None:
    shared = part()
    assert list(collect_facts(nn.ModuleDict({"a": shared, "b": shared}))) == ["a.weight", "a.bias"]


def test_parameters_without_facts_are_named() -> None:
    with pytest.raises(ValueError, match=r"no facts are declared for 1\.weight, 1\.bias: call .*declare"):
        collect_facts(nn.Sequential(part(), nn.Linear(2, 2)))


def test_a_frozen_module_keeps_its_other_facts() -> None:
    model = nn.ModuleDict({"teacher": nn.Sequential(part()), "student": part()})
    freeze(model["teacher"])
    found = collect_facts(model)
    assert found["teacher.0.weight"] == replace(WEIGHT, trained=False)
    assert not found["teacher.0.bias"].trained and found["student.weight"] == WEIGHT


def test_a_run_may_train_some_parameters_alone() -> None:
    whole = plain_program(model_section(family="bert", vocab_size=50), ["predicted_logits"]).facts
    assert fix_others(whole, []) == whole
    found = fix_others(whole, ["embeddings", "encoder.1."])
    trained = {name for name, facts in found.items() if not facts.fixed}
    starts = {name.partition(".")[0] for name in trained if not name.startswith("encoder.1.")}
    assert starts == {"word_embeddings", "embeddings", "mlm_bias"}
    assert not any(facts.matrix and facts.fixed for facts in found.values())
    with pytest.raises(ConfigError, match=r"no parameter's name begins with layers; they begin with .*encoder"):
        fix_others(whole, ["embeddings", "layers"])

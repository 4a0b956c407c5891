"""LAMB against the paper's algorithm in float64: ratios far below and above 1, which parameters take one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ctxlm_ds.parallel.parameters import ZEROS, ParameterFacts
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.optimizers import steps
from ctxlm_ds.training.optimizers.lamb import Lamb, LambSection
from ctxlm_ds.training.optimizers.steps import ParameterLayout, Sharers, Stepper
from tests.published_optimizers import you_2019
from tests.unit.training.optimizers.stepping import take_published_steps, take_steps

RATE, STEPS = 0.01, 3
SCALES = {"tiny": 1e-6, "small": 0.02, "large": 50.0, "huge": 1e4}
"""Sizes of the matrices; a step of Adam has elements of about 1, so a trust ratio is of the same size."""


def start_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {name: scale * torch.randn(6, 5, generator=generator) for name, scale in SCALES.items()}
    return values | {"zero": torch.zeros(4, 3), "bias": 0.3 * torch.randn(7, generator=generator)}


FACTS = {name: ParameterFacts(ZEROS, decays=value.dim() > 1) for name, value in start_values().items()}


def gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + len(name))
    return torch.randn(start_values()[name].shape, generator=generator)


def ours(config: LambSection) -> dict[str, torch.Tensor]:
    return take_steps(config, start_values(), FACTS, gradient, STEPS)


@pytest.mark.parametrize("decay_biases", [False, True])
@pytest.mark.parametrize("trust_ratio", ["weights", "all"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_every_step_is_the_paper_s(weight_decay: float, trust_ratio: str, decay_biases: bool) -> None:
    settings = {"weight_decay": weight_decay, "trust_ratio": trust_ratio, "decay_biases": decay_biases}
    config = LambSection.model_validate({"learning_rate": RATE, **settings})
    found, every_ratio = ours(config), {}
    paper = partial(you_2019, ratios=every_ratio)
    expected = take_published_steps(paper, config, start_values(), FACTS, gradient, STEPS)
    for name, value in start_values().items():
        error = (found[name].double() - expected[name]).norm() / (expected[name] - value.double()).norm()
        assert error < (1e-2 if name == "huge" else 1e-4), name
    ratios = {name: of_steps[0] for name, of_steps in every_ratio.items()}
    assert ratios["tiny"] < 1e-5 and 0.01 < ratios["small"] < 0.1
    assert ratios["large"] > 20 and ratios["huge"] > 50
    assert ratios["zero"] == 1.0


def test_ranges_of_a_tensor_are_updated_as_the_complete_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LambSection(learning_rate=RATE)
    expected = ours(config)
    monkeypatch.setattr(steps, "CHUNK_ELEMENTS", 4)
    found = ours(config)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_one_group_steps_while_others_are_empty() -> None:
    """ZeRO 3 hands over one group's tensor at a time; the other groups must not take part in a collective."""
    weight, bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    groups = [{"params": [weight]}, {"params": [bias], "trust_ratio": False}]
    optimizer = Stepper(groups, Lamb(LambSection(learning_rate=0.1)))
    summed: list[torch.Size] = []
    sharers = Sharers(Topology(), 3, torch.device("cpu"))
    sharers.add_up = lambda tensor: summed.append(tensor.shape)  # type: ignore[method-assign]
    optimizer.bind(ParameterLayout([], {"w": (4,), "b": (2,)}, {}, sharers=sharers))
    optimizer.param_groups[0]["params"] = []
    bias.grad = torch.ones(2)
    optimizer.step()
    assert summed == []
    assert bias.lt(1).all()
    optimizer.param_groups[0]["params"] = [weight]
    weight.grad = torch.ones(4)
    optimizer.step()
    assert summed == [torch.Size([2, 2])]

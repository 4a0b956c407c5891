"""Parameter groups, the choice of an optimizer's implementation, and step counts that survive a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from ctxlm_ds.errors import ConfigError, KernelError
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.parallel.parameters import ZEROS, ParameterFacts
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.sections import OptimizerSection
from ctxlm_ds.registry import FAMILIES, OBJECTIVES
from ctxlm_ds.training.engine.runtime import deepspeed_adam, load_described_optimizer
from ctxlm_ds.training.optimizers.base import OptimizerPlace, optimizer_of
from ctxlm_ds.training.optimizers.build import completed_updates, parameter_groups, restore_state, use_full_vectors
from ctxlm_ds.training.optimizers.steps import MOMENTS, Stepper


def no_adam(offloaded: bool = False) -> Any:
    raise KernelError("no compiler")


CPU = OptimizerPlace("cpu", 0, offloaded=False, adam=no_adam)
CUDA = OptimizerPlace("cuda", 1, offloaded=False, adam=no_adam)
OFFLOADED = OptimizerPlace("cpu", 2, offloaded=True, adam=no_adam)
ADAM = {"learning_rate": 0.01, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.3}
CONFIG = choices.OPTIMIZER.make(**ADAM)


def named_parameters() -> list[tuple[str, nn.Parameter]]:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(4, 2))
    return list(model.named_parameters())


def facts_of(named: list[tuple[str, nn.Parameter]]) -> dict[str, ParameterFacts]:
    """Matrices decay, vectors do not."""
    return {name: ParameterFacts(ZEROS, decays=parameter.dim() > 1) for name, parameter in named}


def groups(config: OptimizerSection = CONFIG) -> list[dict[str, Any]]:
    named = named_parameters()
    return parameter_groups(named, facts_of(named), config)


def torch_adam(offloaded: bool) -> Any:
    """Stands where DeepSpeed's class would be, with the keyword that each of its two has."""
    keyword = "adamw_mode" if offloaded else "adam_w_mode"

    def make(groups: Any, **settings: Any) -> torch.optim.Optimizer:
        assert settings.pop(keyword) is True
        return torch.optim.AdamW(groups, **settings)

    return make


def test_what_is_declared_to_decay_is_decayed() -> None:
    named = named_parameters()
    decayed, plain = parameter_groups(named, facts_of(named), CONFIG)
    names = {id(parameter): name for name, parameter in named}
    assert [names[id(p)] for p in decayed["params"]] == ["0.weight", "2.weight"]
    assert [names[id(p)] for p in plain["params"]] == ["0.bias", "1.weight", "1.bias"]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, None),
        ({"trust_ratio": "all"}, None),
        ({"weight_decay": 0.0}, "for exactly the parameters that are decayed"),
        ({"weight_decay": 0.0, "trust_ratio": "all"}, None),
        ({"decay_biases": True}, "for exactly the parameters that are decayed"),
    ],
)
def test_apex_lamb_takes_the_ratios_that_it_can(
    settings: dict[str, Any], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FusedLAMB takes ratios for groups with weight decay, with `use_nvlamb` for all."""
    seen: list[dict[str, Any]] = []

    class Fused(torch.optim.SGD):
        def __init__(self, groups: Any, **given: Any) -> None:
            seen.append(given)
            super().__init__(groups, lr=given["lr"])

    monkeypatch.setattr("ctxlm_ds.training.optimizers.lamb.apex_optimizer", lambda name: Fused)
    config = choices.OPTIMIZER.make("lamb", **ADAM | settings)
    if refused:
        with pytest.raises(ConfigError, match=refused):
            optimizer_of(config).build(groups(config), "apex", CPU)
        return
    optimizer_of(config).build(groups(config), "apex", CPU)
    assert seen[0]["use_nvlamb"] == (config.trust_ratio == "all")


def test_matrices_are_a_group_of_their_own_with_one_moment() -> None:
    named = [*named_parameters(), ("3.weight", nn.Parameter(torch.empty(0)))]
    facts = facts_of(named) | {"3.weight": ParameterFacts(ZEROS, decays=True, matrix=True)}
    muon = choices.OPTIMIZER.make("muon", **ADAM, matrix_learning_rate=0.02)
    own, decayed, plain = parameter_groups(named, facts, muon)
    assert own["params"][0] is named[-1][1] and own["matrices"] and own["rate_factor"] == 2.0
    assert (own["weight_decay"], len(decayed["params"]), len(plain["params"])) == (0.3, 2, 3)
    assert [muon.moments_of(facts[name].matrix) for name in ("3.weight", "2.weight")] == [MOMENTS[:1], MOMENTS]
    decayed, plain = parameter_groups(named, facts, CONFIG)
    assert (len(decayed["params"]), len(plain["params"])) == (3, 3)
    assert CONFIG.moments_of(matrix=True) == MOMENTS


def test_a_group_without_parameters_is_left_out() -> None:
    named = [("b", nn.Parameter(torch.zeros(2)))]
    assert [group["weight_decay"] for group in parameter_groups(named, facts_of(named), CONFIG)] == [0.0]


@pytest.mark.parametrize("family", FAMILIES.names())
def test_biases_and_norms_of_every_family_are_not_decayed(family: str) -> None:
    entry = FAMILIES.get(family)
    sections = entry.tiny()
    model = entry.section.model_validate({"family": family, "vocab_size": 61} | sections["model"])
    whole = plain_program(model, OBJECTIVES.get(sections["objective"]["name"]).outputs)
    for name, facts in whole.facts.items():
        # A table of biases of the attention's scores is a bias too (T5, XLNet).
        is_bias = name.removesuffix(".weight").endswith("_bias")
        assert facts.decays == (len(whole.shapes[name]) > 1 and not is_bias), name


@pytest.mark.parametrize(
    ("kernel", "place", "factory", "choice"),
    [
        ("auto", CPU, no_adam, "adamw=torch(fused)"),
        ("reference", CPU, no_adam, "adamw=reference"),
        ("auto", CUDA, torch_adam, "adamw=deepspeed"),
        ("auto", CUDA, no_adam, "adamw=torch(fused)"),
        ("torch", CUDA, torch_adam, "adamw=torch(fused)"),
        ("auto", OFFLOADED, torch_adam, "adamw=deepspeed"),
        ("reference", OFFLOADED, torch_adam, "adamw=reference"),
    ],
)
def test_choice(kernel: str, place: OptimizerPlace, factory: Callable[[bool], Any], choice: str) -> None:
    place = replace(place, adam=partial(factory, place.offloaded))
    optimizer, said = optimizer_of(CONFIG).build(groups(), kernel, place)
    assert said == choice
    decayed, plain = optimizer.param_groups
    assert (decayed["lr"], decayed["betas"], decayed["eps"]) == (0.01, (0.8, 0.9), 1e-5)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)


@pytest.mark.parametrize(
    ("name", "kernel", "place", "error", "words"),
    [
        ("adamw", "deepspeed", CPU, KernelError, "no compiler"),
        ("adamw", "apex", CPU, KernelError, "install apex from source"),
        ("adamw", "torch", OFFLOADED, ConfigError, "ZeRO-Offload"),
        ("adamw", "apex", OFFLOADED, ConfigError, "ZeRO-Offload"),
        ("lamb", "torch", CPU, KernelError, "no exact lamb"),
        ("lamb", "deepspeed", CPU, KernelError, "no exact lamb"),
        ("lamb", "apex", CUDA, ConfigError, "trust ratios"),
        ("muon", "torch", CPU, KernelError, "no exact muon"),
        ("muon", "apex", CUDA, KernelError, "no exact muon"),
        ("stable_adamw", "deepspeed", CUDA, KernelError, "no exact stable_adamw"),
        ("lamb", "apex", CPU, KernelError, "FusedLAMB"),
    ],
)
def test_refusal(name: str, kernel: str, place: OptimizerPlace, error: type[Exception], words: str) -> None:
    config = choices.OPTIMIZER.make(name, **ADAM)
    with pytest.raises(error, match=words):
        optimizer_of(config).build(groups(config), kernel, place)


def test_an_op_that_cannot_be_built_is_a_kernel_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builders fail in many ways; a GPU machine without nvcc must fall back to torch's fused AdamW."""
    from deepspeed.ops.op_builder import FusedAdamBuilder

    def fail(self: Any, verbose: bool = False) -> Any:
        raise Exception("CUDA_HOME does not exist")

    monkeypatch.setattr(FusedAdamBuilder, "load", fail)
    with pytest.raises(KernelError, match=r"CUDA_HOME does not exist.*kernels\.optimizer: auto or torch"):
        deepspeed_adam(False)
    place = replace(CUDA, adam=partial(deepspeed_adam, False))
    assert optimizer_of(CONFIG).build(groups(), "auto", place)[1] == "adamw=torch(fused)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has Lion's kernel")
def test_a_described_optimizer_without_an_operator_here_is_a_kernel_error() -> None:
    with pytest.raises(KernelError, match=r"FusedLion cannot be built here .*CPU.*; in the DeepSpeed JSON choose"):
        load_described_optimizer({"type": "lion", "params": {}}, offloaded=False)
    for section in ({"type": "SGD", "params": {}}, {"type": "adam", "params": {"torch_adam": True}}):
        load_described_optimizer(section, offloaded=False)


def deepspeed_fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return deepspeed_adam(False)(parameters, lr=0.01)


def deepspeed_cpu(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return deepspeed_adam(True)([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.01)


def own(name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: Stepper(parameters, optimizer_of(choices.OPTIMIZER.make(name, learning_rate=0.01)))


MAKERS: list[tuple[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer], tuple[str, ...]]] = [
    ("AdamW fused", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), ("exp_avg", "exp_avg_sq")),
    ("AdamW loop", lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, fused=False), ("exp_avg", "exp_avg_sq")),
    ("Adam", lambda p: torch.optim.Adam(p, lr=0.01), ("exp_avg", "exp_avg_sq")),
    ("Adagrad", lambda p: torch.optim.Adagrad(p, lr=0.01), ("sum",)),
    ("Lamb", own("lamb"), ("exp_avg", "exp_avg_sq")),
    ("Adagrad of the recipe", own("adagrad"), ("exp_avg_sq",)),
    ("StableAdamW", own("stable_adamw"), ("exp_avg", "exp_avg_sq")),
    ("Muon", own("muon"), ("exp_avg", "exp_avg_sq")),
    ("FusedAdam", deepspeed_fused, ("exp_avg", "exp_avg_sq")),
    ("CPUAdam", deepspeed_cpu, ("exp_avg", "exp_avg_sq")),
]


def take_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], start: int, stop: int) -> None:
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(("make", "kinds"), [m[1:] for m in MAKERS], ids=[m[0] for m in MAKERS])
@pytest.mark.parametrize("updates", [2, 5])
def test_restored_state_goes_on_bitwise(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], kinds: tuple[str, ...], updates: int
) -> None:
    """The same numbers as without an interruption: the step counts are right and go on counting.

    The CPU build of FusedAdam keeps one running product of betas for all optimizers of a process, so it is compared
    within that rounding.
    """
    torch.set_num_threads(1)
    ours = [nn.Parameter(torch.linspace(-1, 1, 64)), nn.Parameter(torch.ones(9))]
    without_stop = make(ours)
    take_steps(without_stop, ours, 0, updates)
    assert completed_updates(without_stop) == updates

    copies = [nn.Parameter(p.detach().clone()) for p in ours]
    resumed = make(copies)
    restore_state(resumed, copies, completed_updates(without_stop), kinds)
    for copy, original in zip(copies, ours, strict=True):
        for kind in kinds:
            resumed.state[copy][kind].copy_(without_stop.state[original][kind])
    assert completed_updates(resumed) == updates
    take_steps(without_stop, ours, updates, updates + 3)
    take_steps(resumed, copies, updates, updates + 3)
    assert completed_updates(resumed) == updates + 3
    for copy, original in zip(copies, ours, strict=True):
        tolerance = 1e-6 if make is deepspeed_fused else 0.0
        torch.testing.assert_close(copy, original, rtol=tolerance, atol=tolerance)


def cpu_adam_after_five_steps(weights: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    weight = nn.Parameter(weights.clone())
    optimizer = deepspeed_adam(True)([weight], lr=0.01, weight_decay=0.01)
    use_full_vectors(optimizer)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[weight]
    return torch.stack([weight.detach(), state["exp_avg"], state["exp_avg_sq"]])


def test_cpu_adam_rounds_alike_at_every_place() -> None:
    """By itself it rounds the elements behind the last whole vector otherwise."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(4096, generator=generator), torch.randn(5, 4096, generator=generator)
    whole = cpu_adam_after_five_steps(weights, gradients)
    parts = [0, 3, 66, 127, 128, 2047, 2050, 4001, 4096]
    for start, stop in pairwise(parts):
        part = cpu_adam_after_five_steps(weights[start:stop], gradients[:, start:stop])
        assert torch.equal(part, whole[:, start:stop]), (start, stop)

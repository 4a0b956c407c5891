"""Facts of a parameter, declared beside it: how it is split, initialised, decayed, extended.

They are kept in a dict on the module that owns the parameter, because an attribute of the tensor is lost by deepcopy,
`to_empty` and assignment. Placement, initialisation, optimizer groups, imports and the planner read them from the
model as it is built on the `meta` device, by full name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from ctxlm_ds.parallel.placement import Split

Growth = Literal["vocabulary", "position table"]


@dataclass(frozen=True)
class Constant:
    """The same initial value everywhere: 0 of biases, 1 of LayerNorm weights."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution around 0."""

    standard_deviation: float
    truncated: bool = False
    """True to draw values beyond two standard deviations again (TensorFlow's truncated_normal_initializer)."""


Init = Constant | Normal
ZEROS, ONES = Constant(0.0), Constant(1.0)


@dataclass(frozen=True)
class ParameterFacts:
    """What the rest of the system must know of one parameter."""

    init: Init
    decays: bool
    """Whether weight decay applies."""
    split: Split | None = None
    """How tensor-parallel ranks share it; None if each holds all of it."""
    grows: Growth | None = None
    """What a larger model has more rows of; `initialize_from` then keeps the fresh values of the further rows."""
    optional: bool = False
    """True for a head that the objective decides: `initialize_from` may lack it or have it in excess."""
    trained: bool = True
    """False for weights that no step changes (a teacher's): no gradient, not part of checkpoints."""


def declare(module: nn.Module, **facts: ParameterFacts) -> None:
    """Attach facts to parameters that `module` owns, by attribute name."""
    held: dict[str, ParameterFacts] = module.__dict__.setdefault("parameter_facts", {})
    held.update(facts)


def freeze(module: nn.Module) -> None:
    """Declare every parameter of a module one that no step changes."""
    for part in module.modules():
        declare(part, **{name: replace(facts, trained=False) for name, facts in _own_facts(part).items()})


def collect_facts(model: nn.Module) -> dict[str, ParameterFacts]:
    """Return the facts of every parameter of a model by full name, in the order of `named_parameters`.

    Raises:
        ValueError: a parameter has no facts (an error of the family's code, found where the model is built).
    """
    found: dict[str, ParameterFacts] = {}
    undeclared: list[str] = []
    for name, _ in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        facts = _own_facts(model.get_submodule(prefix)).get(leaf)
        if facts is None:
            undeclared.append(name)
        else:
            found[name] = facts
    if undeclared:
        raise ValueError(
            f"no facts are declared for {', '.join(undeclared)}: call parallel.parameters.declare() where the "
            "parameter is made"
        )
    return found


def _own_facts(module: nn.Module) -> Mapping[str, ParameterFacts]:
    return module.__dict__.get("parameter_facts", {})

"""Facts of a parameter: its split, initial values, weight decay and growth; and the initial values.

Seed and full name are the key of each parameter's random stream, so initial values do not depend on the layout.
A dict on the module that owns the parameter holds them, because deepcopy, `to_empty` and assignment lose attributes of
a tensor. Placement, initialisation, optimizer groups, imports and the planner read them by full name from the model on
the `meta` device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.parallel.placement import Split

Growth = Literal["vocabulary", "position table"]


@dataclass(frozen=True)
class Constant:
    """One initial value for all elements: 0 for biases, 1 for LayerNorm weights."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution around 0."""

    standard_deviation: float
    truncated: bool = False
    """True to draw values beyond two standard deviations again (TensorFlow's truncated_normal_initializer)."""
    row_factors: tuple[float, ...] = ()
    """Factors of the deviation for equal blocks of rows (query, key and value); empty for 1."""


@dataclass(frozen=True)
class Uniform:
    """Initial values between -limit and limit, all equally likely."""

    limit: float


Init = Constant | Normal | Uniform
ZEROS, ONES = Constant(0.0), Constant(1.0)


@dataclass(frozen=True)
class ParameterFacts:
    """Properties of one parameter that other code reads."""

    init: Init
    decays: bool
    """True for weights; False for biases and LayerNorm, which weight decay usually spares."""
    split: Split | None = None
    """Its division among tensor-parallel ranks; None if each holds all of it."""
    grows: Growth | None = None
    """Reason why a larger model has more rows. `initialize_from` leaves the rows of additional words at their initial
    values, and copies positions into those of additional positions."""
    unused_rows: int = 0
    """Rows of a position table before that of position 0."""
    optional: bool = False
    """True for a head of the objective, which a source of `initialize_from` may lack or have in addition."""
    matrix: bool = False
    """True for the weight of a product within the repeated layers, which `muon` orthogonalises; False for tables."""
    trained: bool = True
    """False for a teacher's weights: they have no gradient and are not in checkpoints."""
    fixed: bool = False
    """True for a parameter that this run leaves as it is (training.only)."""
    rate_factor: float = 1.0
    """Of its learning rate (models/parts/width.py); matrices that the optimizer takes complete have their own rate."""


def declare(module: nn.Module, **facts: ParameterFacts) -> None:
    """Attach facts to parameters that `module` owns, by attribute name."""
    held: dict[str, ParameterFacts] = module.__dict__.setdefault("parameter_facts", {})
    held.update(facts)


def freeze(module: nn.Module) -> None:
    """Declare every parameter of a module as not trained."""
    for part in module.modules():
        declare(part, **{name: replace(facts, trained=False) for name, facts in _own_facts(part).items()})


def collect_facts(model: nn.Module) -> dict[str, ParameterFacts]:
    """Return the facts of every parameter of a model by full name, in the order of `named_parameters`.

    A parameter without facts is a ValueError (an error in the family's code).
    """
    found: dict[str, ParameterFacts] = {}
    for name, _ in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        if leaf in (own := _own_facts(model.get_submodule(prefix))):
            found[name] = own[leaf]
    undeclared = [name for name, _ in model.named_parameters() if name not in found]
    if undeclared:
        raise ValueError(
            f"no facts are declared for {', '.join(undeclared)}: call parallel.parameters.declare() where the "
            "parameter is made"
        )
    return found


def fix_others(facts: Mapping[str, ParameterFacts], only: Sequence[str]) -> Mapping[str, ParameterFacts]:
    """Return the facts of a run that trains `only` the parameters whose names begin so; ConfigError if none does.

    `embeddings` is also each parameter with a row for each word. None at all trains everything.
    """
    chosen: set[str] = set()
    for start in only:
        found = {name for name, own in facts.items() if own.trained and (
            name.startswith(start) or (start == "embeddings" and own.grows == "vocabulary"))}  # fmt: skip
        if not found:
            starts = ", ".join(dict.fromkeys(name.partition(".")[0] for name in facts))
            raise ConfigError(f"training.only: no parameter's name begins with {start}; they begin with {starts}")
        chosen |= found
    fixed = {name: replace(facts[name], fixed=True, matrix=False) for name in facts.keys() - chosen if only}
    return {**facts, **fixed}


def _own_facts(module: nn.Module) -> Mapping[str, ParameterFacts]:
    return module.__dict__.get("parameter_facts", {})


STREAM_PURPOSE = "ctxlm_ds initial value"


def initial_value(name: str, shape: Sequence[int], init: Init, seed: int) -> Tensor:
    """Return the full parameter's fp32 value on the CPU, the same one for every rank, device and layout."""
    value = torch.empty(tuple(shape), device="cpu", dtype=torch.float32)
    if isinstance(init, Constant):
        return value.fill_(init.value)
    digest = hashlib.sha256(f"{STREAM_PURPOSE}\0{seed}\0{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    if isinstance(init, Uniform):
        return value.uniform_(-init.limit, init.limit, generator=generator)
    deviation = init.standard_deviation
    if init.truncated:
        nn.init.trunc_normal_(value, 0.0, deviation, -2 * deviation, 2 * deviation, generator=generator)
    else:
        value.normal_(0.0, deviation, generator=generator)
    for factor, rows in zip(init.row_factors, value.chunk(max(1, len(init.row_factors))), strict=False):
        rows.mul_(factor)
    return value


def initialize_parameters(module: nn.Module, seed: int, facts: Mapping[str, ParameterFacts] | None = None) -> None:
    """Set every parameter of a complete model to its initial value, rounded to its type; skip `meta` parameters.

    `facts` are in place of those that the modules declare.
    """
    facts = facts or collect_facts(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(initial_value(name, parameter.shape, facts[name].init, seed))

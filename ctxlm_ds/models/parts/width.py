"""Maximal-update parametrisation (Yang et al. 2022, arXiv:2203.03466): rates tuned at one width fit others.

With m = hidden_size / base_width, for Adam (table 8 with tied embeddings): matrices of the blocks begin sqrt(m)
smaller and learn m times slower, and logits are divided by m. The divisor is in the weights of the norm before the
output layer, which begin m times smaller and learn m times slower. For Adam this is the same (section J.2.1) except for
a clipped gradient, so that plain classes compute this model. Heads keep their size, and with it the factor of attention
scores. Muon with its `original` scale bounds the update of a matrix by its shape and keeps its rate (Yang et al. 2023,
arXiv:2310.17813).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ctxlm_ds.parallel.parameters import Constant, Init, Normal, ParameterFacts
from ctxlm_ds.recipe.sections import ModelSection

if TYPE_CHECKING:
    from ctxlm_ds.families.base import PreNormSection


def with_width(facts: Mapping[str, ParameterFacts], model: ModelSection) -> dict[str, ParameterFacts]:
    """Return the facts of the parameters of a model with the initial values and rates of its width."""
    factor: float | None = getattr(model, "relative_width", None)
    if factor is None:
        return dict(facts)
    own = cast("PreNormSection", model)
    return {name: _scaled(name, one, factor, own) if one.trained else one for name, one in facts.items()}


def _scaled(name: str, facts: ParameterFacts, factor: float, model: PreNormSection) -> ParameterFacts:
    if name.startswith(f"{model.output_norm}."):
        return replace(facts, init=_divided(facts.init, factor), rate_factor=1 / factor)
    if facts.matrix or name in model.hidden_matrices:
        return replace(facts, init=_divided(facts.init, math.sqrt(factor)), rate_factor=1 / factor)
    return facts


def _divided(init: Init, divisor: float) -> Init:
    if isinstance(init, Constant):
        return Constant(init.value / divisor)
    assert isinstance(init, Normal)
    return replace(init, standard_deviation=init.standard_deviation / divisor)

"""Whether a family, an objective and a sample format go together, judged by what each has and needs.

In: a RunConfig. Out: problems that name what would fit. Not here: rules of one section (its class has them).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ctxlm_ds.recipe.choices import DATA, MODEL, OBJECTIVE, listed
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.schema import RunConfig


def fit_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what keeps family, objective and sample format from going together."""
    family = MODEL.registry.get(config.model.family)
    objective = OBJECTIVE.registry.get(config.objective.name)
    sample_format = DATA.registry.get(config.data.sample_format)
    judged = [objective]
    if not _model_fits(family, objective):
        yield _objective_problem(config, family, objective)
        # The format is judged by the objectives that the family allows, so that one mistake is one problem.
        judged = [other for other in OBJECTIVE.entries().values() if _model_fits(family, other)]
    if judged and not any(_format_fits(sample_format, other) for other in judged):
        yield _format_problem(config, judged, sample_format)


def _model_fits(family: Any, objective: Any) -> bool:
    """Return whether the model writes every tensor that the objective needs."""
    return set(objective.outputs) <= family.outputs


def _format_fits(sample_format: Any, objective: Any) -> bool:
    """Return whether the format's samples have what the objective needs of them."""
    has_pairs = sample_format.makes_pairs or not objective.needs_pairs
    return bool(has_pairs and objective.shifted == sample_format.shifted)


def _objective_problem(config: RunConfig, family: Any, objective: Any) -> Problem:
    missing = sorted(set(objective.outputs) - family.outputs)
    objectives = [name for name, other in OBJECTIVE.entries().items() if _model_fits(family, other)]
    families = [name for name, other in MODEL.entries().items() if _model_fits(other, objective)]
    return Problem(
        OBJECTIVE.path,
        f"{config.objective.name} needs {listed(missing, 'and')} of the model, which {MODEL.path} "
        f"{config.model.family} does not compute; {_remedy({OBJECTIVE.path: objectives, MODEL.path: families})}",
        (MODEL.path,),
    )


def _format_problem(config: RunConfig, judged: list[Any], sample_format: Any) -> Problem:
    objective = judged[0]
    name = f"{OBJECTIVE.path} {objective.name}"
    if objective.shifted and not sample_format.shifted:
        reason = f"leaves no token after the last input for {name} to predict"
    elif sample_format.shifted and not objective.shifted:
        reason = f"keeps the last token of a sample as a label, which {name} does not read"
    else:
        reason = f"has no second segment for {name} to judge"
    formats = [name for name, other in DATA.entries().items() if any(_format_fits(other, one) for one in judged)]
    family = MODEL.registry.get(config.model.family)
    objectives = [
        name
        for name, other in OBJECTIVE.entries().items()
        if _format_fits(sample_format, other) and _model_fits(family, other)
    ]
    return Problem(
        DATA.path,
        f"{config.data.sample_format} {reason}; {_remedy({DATA.path: formats, OBJECTIVE.path: objectives})}",
        (OBJECTIVE.path, MODEL.path),
    )


def _remedy(fitting: dict[str, list[str]]) -> str:
    choices = [f"{path} to {listed(names)}" for path, names in fitting.items() if names]
    return f"set {', or '.join(choices)}" if choices else "nothing that is registered goes with it"

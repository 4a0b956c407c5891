"""The steps of a pipeline as plain values: what each runs, what it goes by, what it makes, what it comes after.

Out: Step, Plan. Not here: how a recipe becomes one (pipeline_plan.py), what is done already (pipeline_verdict.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ctxlm_ds.cluster.pipeline_outputs import Output
from ctxlm_ds.cluster.pipeline_records import Need, Order
from ctxlm_ds.recipe.pipeline_schema import StepResources


@dataclass(frozen=True)
class Step:
    """One step: one job, or an array of them."""

    name: str
    commands: tuple[str, ...]
    """Lines of shell; none for pretraining, which has a batch script of its own."""
    settings: Mapping[str, Any]
    """All that decides the content of what it makes, beside `needs`."""
    tasks: tuple[tuple[Output, ...], ...]
    """What each job of the array makes."""
    resources: StepResources
    needs: tuple[str, ...] = ()
    """Steps whose outputs decide the content of this one's."""
    waits: tuple[str, ...] = ()
    """Further steps that it must come after."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """How it is made, which the content does not depend on."""
    temporary: bool = False
    """Its outputs are of no use once the steps that read them are done."""
    rebuilds: bool = False
    """Made anew beside what is there, so that changed settings need no permission."""
    recipe: str | None = None
    """File name in OUTPUT/steps of the recipe that it reads."""
    unreadable: str = ""
    """Why the texts that it reads cannot be read."""

    @property
    def is_pretraining(self) -> bool:
        """Whether slurm/pretrain.sbatch runs it."""
        return not self.commands

    @property
    def comes_after(self) -> tuple[str, ...]:
        """Every step that must be done before."""
        return (*self.needs, *self.waits)


@dataclass(frozen=True)
class Plan:
    """All steps in order."""

    name: str
    recipe: str
    """As the user named it."""
    folder: Path
    steps: tuple[Step, ...]
    recipes: Mapping[str, str]
    """Recipes of the phases by file name."""
    tasks_at_once: int | None = None
    """Most jobs of an array that run together."""

    @cached_property
    def by_name(self) -> dict[str, Step]:
        """Steps by name."""
        return {step.name: step for step in self.steps}

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Everything that a step makes."""
        return tuple(output for outputs in self.by_name[name].tasks for output in outputs)

    def readers(self, name: str) -> list[Step]:
        """The steps that come directly after one."""
        return [step for step in self.steps if name in step.comes_after]

    def order(self, step: Step) -> Order:
        """What the step's job is told."""
        return Order(
            step=step.name, folder=self.folder, commands=step.commands, settings=step.settings, layout=step.layout,
            needs=tuple(Need(name, self.outputs(name)) for name in step.needs), tasks=step.tasks,
        )  # fmt: skip


def flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{above}{key}"
        flat |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat

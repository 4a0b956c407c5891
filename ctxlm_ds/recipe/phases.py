"""Phases of a recipe: the recipe of each, as runs one after another would have them. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from ctxlm_ds.recipe.choices import OBJECTIVE
from ctxlm_ds.recipe.phase import Phase
from ctxlm_ds.recipe.problems import Problem, raise_problems
from ctxlm_ds.recipe.raw import RawRecipe, validate
from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig, flat_settings
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from ctxlm_ds.recipe.yaml_source import YamlSource

CHANGEABLE = (
    "data.", "objective.", "optimizer.", "schedule.", "kernels.", "evaluation.", "checkpoint.", "anomalies.",
    "training.global_batch_size", "training.batch_ramp", "training.micro_batch_size",
    "training.activation_checkpointing", "training.only", "training.ema", "parallel.context_parallel_size",
)  # fmt: skip
"""Settings that a phase may change, and those of the model with a word of MODEL_WORDS."""
MODEL_WORDS = ("max_position_embeddings", "rotary", "local_attention", "dropout")
NAMES = ("objective.name", "optimizer.name")
SET_LENGTHS = "give the phases other lengths, or --set phases=[] for a run of one phase"


@dataclass(frozen=True)
class RunPhase:
    """One phase of a run."""

    config: RunConfig
    """Its recipe, without phases; training.max_steps counts its own steps."""
    phase: Phase
    number: int
    """Its place in the run, from 0."""
    count: int
    """Number of phases of the run."""
    continues: bool
    """True if its rows follow those of the phase before."""

    @property
    def is_last(self) -> bool:
        return self.number + 1 == self.count

    def describe(self) -> str:
        """Return `phase 2 of 3`."""
        return f"phase {self.number + 1} of {self.count}"


def run_phases(config: RunConfig, world_size: int | None = None, tree: RawRecipe | None = None) -> list[RunPhase]:
    """Return the phases of a recipe; a recipe without phases is one.

    `tree` has the places of settings for messages. Raises ConfigError for a length, an unknown setting, or a setting
    that a phase cannot change or combine.
    """
    if not config.phases:
        return [RunPhase(config, Phase(), 0, 1, False)]
    raise_problems(f"recipe {config.name}", list(_length_problems(config.phases, config.training)))
    found = _Recipes(config, world_size, tree).build()
    follows = [False, *(same_rows(one, other) for one, other in pairwise(found))]
    return [
        RunPhase(one, phase, number, len(found), follows[number] and phase.data != "restart")
        for number, (one, phase) in enumerate(zip(found, config.phases, strict=True))
    ]


def all_steps(phases: Sequence[RunPhase], given: int) -> int:
    """Return the sum of the steps of all phases; STEPS_FOLLOW if words or hours give one.

    Raises ConfigError if the recipe has another number, `given`, already.
    """
    steps = min(sum(phase.config.training.max_steps for phase in phases), STEPS_FOLLOW)
    if given not in (STEPS_FOLLOW, steps):
        text = f"{given:,}, but the phases have {steps:,} steps; {SET_LENGTHS}"
        raise_problems(f"recipe {phases[0].config.name}", [Problem("training.max_steps", text, ("phases",))])
    return steps


def same_rows(before: RunConfig, now: RunConfig) -> bool:
    """Return whether two recipes read the same rows in the same order."""
    one, other = before.flat(), now.flat()
    names = {f"data.{name}" for each in (before, now) for name in each.data.fixed} | {"training.seed"}
    is_static = OBJECTIVE.registry.get(before.objective.name).is_static(before.objective)
    lanes = before.data.in_lanes and before.training.global_batch_size != now.training.global_batch_size
    return (
        all(one.get(name) == other.get(name) for name in names)
        and before.data.train == now.data.train
        and before.objective.sample_length(before.data) == now.objective.sample_length(now.data)
        and not (is_static and before.objective != now.objective)
        and not lanes
    )


def _length_problems(phases: Sequence[Phase], training: TrainingConfig) -> Iterator[Problem]:
    shares = [phase.share for phase in phases if phase.share is not None]
    for number, phase in enumerate(phases):
        given = [name for name in Phase.LENGTHS if getattr(phase, name) is not None]
        if len(given) != 1:
            text = f"{' and '.join(given) or 'no length'}: give exactly one of {', '.join(Phase.LENGTHS)}"
            yield Problem(f"phases[{number}]", text)
    if shares and (len(shares) < len(phases) or abs(sum(shares) - 1.0) > 1e-9):
        text = f"shares of {', '.join(f'{share:g}' for share in shares)}: all phases have one, and they add up to 1"
        yield Problem("phases", text)
    elif shares and training.max_steps < len(shares):
        text = f"{training.max_steps}, but each of the {len(shares)} phases needs a step; {SET_LENGTHS}"
        yield Problem("training.max_steps", text, ("phases",))
    elif shares and training.max_steps == STEPS_FOLLOW:
        yield Problem("training.max_steps", "missing: phases with a share divide it", ("phases",))
    if training.max_words is not None:
        text = f"{training.max_words:,}: with phases each one has its length; set null"
        yield Problem("training.max_words", text, ("phases",))


class _Recipes:
    """Recipes of the phases of a run."""

    def __init__(self, config: RunConfig, world_size: int | None, tree: RawRecipe | None) -> None:
        """Find the steps of each phase; STEPS_FOLLOW where words or hours give them."""
        self._config, self._phases, self._world_size = config, config.phases, world_size
        sources = reversed(tree.places) if tree is not None else ()
        self._written: dict[tuple[Any, ...], str]
        """Places of settings below `phases`, for messages."""
        self._written = next((dict(places) for places in sources if any(at[:1] == ("phases",) for at in places)), {})
        self._built: list[RunConfig] = []
        self._loose = [self._recipe(number) for number in range(len(self._phases))]
        self._lengths = self._steps() if self._phases[0].share is None else self._shared_steps()

    def build(self) -> list[RunConfig]:
        """Return the recipe of each phase. Raises ConfigError for a setting that a phase cannot change or combine."""
        for number, phase in enumerate(self._phases):
            placed = {"training": {"max_steps": self._lengths[number], "max_words": phase.words}}
            recipe = self._recipe(number, {**placed, "schedule": self._schedule_place(number)}, self._world_size)
            raise_problems(self._title(number), list(self._change_problems(number, recipe)))
            self._built.append(recipe)
        return self._built

    def _title(self, number: int) -> str:
        return f"recipe {self._config.name}, phases[{number}]"

    def _recipe(self, number: int, placed: dict[str, Any] | None = None, world_size: int | None = None) -> RunConfig:
        """Return the recipe of a phase, with the changes of those before it; without `placed` its steps are open."""
        raw = RawRecipe(self._config.model_dump(mode="json") | {"phases": []})
        for index, phase in enumerate(self._phases[: number + 1]):
            name = f"phases[{index}].set"
            raw.merge(YamlSource(deepcopy(phase.set)), name)
            below = ("phases", index, "set")
            own = {path[3:]: place for path, place in self._written.items() if path[:3] == below and len(path) > 3}
            raw.places[-1] = own or {tuple(path.split(".")): name for path in flat_settings(phase.set)}
        open_steps: dict[str, Any] = {"training": {"max_steps": STEPS_FOLLOW}, "schedule": {"total_steps": None}}
        for section, values in (placed or open_steps).items():
            raw.data[section] = {**raw.data[section], **values}
        return validate(raw, self._title(number), world_size)

    def _shared_steps(self) -> list[int]:
        total = self._config.training.max_steps
        step_tokens = [one.training.global_batch_size * one.data.seq_length for one in self._loose]
        parts = [(phase.share or 0.0) / tokens for phase, tokens in zip(self._phases, step_tokens, strict=True)]
        ends = [round(total * sum(parts[: number + 1]) / sum(parts)) for number in range(len(parts))]
        for number in range(len(ends)):  # every phase has a step
            least = (ends[number - 1] if number else 0) + 1
            ends[number] = min(max(ends[number], least), total - (len(ends) - 1 - number))
        return [end - (ends[number - 1] if number else 0) for number, end in enumerate(ends)]

    def _steps(self) -> list[int]:
        lengths, row = list[int](), 0
        for number, (phase, one) in enumerate(zip(self._phases, self._loose, strict=True)):
            if number and (phase.data == "restart" or not same_rows(self._loose[number - 1], one)):
                row = 0  # a batch ramp may be over where the phase begins
            steps = phase.steps or STEPS_FOLLOW
            if phase.tokens is not None:
                end = row + -(-phase.tokens // one.data.seq_length)
                steps = bisect_left(range(STEPS_FOLLOW), end, key=partial(one.training.rows_after, rows_read=row))
            lengths.append(steps)
            row = one.training.rows_after(steps, row)
        return lengths

    def _schedule_place(self, number: int) -> dict[str, int | None]:
        """Return start_step and total_steps of a phase: a schedule runs on until a phase sets another one."""
        own: list[dict[str, Any]] = [phase.set.get("schedule") or {} for phase in self._phases]
        lengths, first = self._lengths, max(index for index in range(number + 1) if index == 0 or own[index])
        after = next((index for index in range(number + 1, len(own)) if own[index]), len(own))
        start = self._loose[number].schedule.start_step
        total = own[first].get("total_steps", None if first else self._config.schedule.total_steps)
        if total is None and after - first > 1:
            total = min(start + sum(lengths[first:after]), STEPS_FOLLOW)
        return {"start_step": min(start + sum(lengths[first:number]), STEPS_FOLLOW), "total_steps": total}

    def _change_problems(self, number: int, now: RunConfig) -> Iterator[Problem]:
        before, phase = self._built[-1] if self._built else self._config, self._phases[number]
        name, old, new = f"phases[{number}]", before.flat(), now.flat()
        placed = ("schedule.start_step", "schedule.total_steps", "training.max_steps", "training.max_words", "phases")
        for key in dict.fromkeys((*old, *new)):
            of_model = key.startswith("model.") and any(word in key for word in MODEL_WORDS)
            fixed = key in NAMES or not (of_model or key.startswith(CHANGEABLE))
            if old.get(key) != new.get(key) and fixed and key not in placed and not key.startswith("phases"):
                text = "a phase cannot change it; start another run from its weights (initialize_from)"
                yield Problem(f"{name}.set.{key}", f"{new.get(key)!r}: {text}")
        size = "model.max_position_embeddings"
        if (new.get(size) or 0) < (old.get(size) or 0):
            yield Problem(f"{name}.set.{size}", f"{new[size]} is below {old[size]} of the phase before; only more fit")
        if phase.moments != "fresh" and number and now.optimizer.handed_over:
            text = f"{phase.moments}: those of an optimizer of the DeepSpeed JSON are unknown then; set fresh"
            yield Problem(f"{name}.moments", text)
        if phase.data == "continue" and number and not same_rows(before, now):
            yield Problem(f"{name}.data", "continue, but its settings change the rows; set restart")
        open_length = self._lengths[number] == STEPS_FOLLOW and phase.words is None
        row_is_open = STEPS_FOLLOW in self._lengths[:number] and phase.data != "restart" and same_rows(before, now)
        if phase.tokens is not None and now.training.batch_ramp is not None and row_is_open:
            text = "words or hours before it leave the place in the batch ramp open; give steps"
            yield Problem(f"{name}.tokens", text)
        if number and getattr(before.schedule, "until_hours", None) and not phase.set.get("schedule"):
            yield Problem(f"{name}.set.schedule", "missing: the schedule ends with until_hours in the phase before")
        shared, by_time = now.schedule.total_steps == STEPS_FOLLOW, getattr(now.schedule, "until_hours", None)
        if now.schedule.decays_to_the_end and (open_length or shared) and not by_time:
            remedy = "set constant, wsd with until_hours, or a schedule of the phase"
            text = f"{now.schedule.name}, but words or hours give the steps; {remedy}"
            yield Problem(f"{name}.set.schedule.name", text)

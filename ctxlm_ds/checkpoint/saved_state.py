"""What a checkpoint says of its run without torch: its state.json, its recipe next to that of a start, its progress.

state.json holds the train state, what describes the training rows, and the environment of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, find_newest_intact, step_of
from ctxlm_ds.checkpoint.manifest import MAX_STEP, verify
from ctxlm_ds.console import counted, logger
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.recipe.phases import RunPhase, run_phases
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import TrainSource
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from ctxlm_ds.training.loop.state import TrainState
from ctxlm_ds.training.schedules.schedule import LearningRateSchedule
from ctxlm_ds.untrusted_json import read_json_object

STATE_NAME = "state.json"
RECIPE_NAME = "recipe.yaml"
"""The recipe of a run with phases; config.yaml has the settings of the checkpoint's phase."""
SOURCES = "sources"
LEARNING_RATE = ("schedule.", "optimizer.learning_rate", "training.max_steps")
"""Settings that change the curve only if they change the rate of a step that is still to come."""
CURVE = ("optimizer.", "deepspeed.", "training.global_batch_size", "training.batch_ramp", "anomalies.")
"""Other settings that change the curve, or can change it."""
ROUNDING = ("kernels.", "training.compile", "training.grad_accum_dtype", "training.deterministic", "teacher.precision")
"""Settings that change the rounding."""
LAYOUT = ("parallel.", "deepspeed", "training.micro_batch_size", "training.precision")
"""Settings that the differences of the environment report."""
NOT_COMPARED = ("extends", "name", "run_dir", "initialize_")
COMPARED_RATES = 10_000
"""Steps, about, whose rates are compared; all of a shorter run."""


class _Source(BaseModel):
    """A training source as a checkpoint describes it."""

    model_config = ConfigDict(strict=True)

    path: str
    documents: list[int] = Field(min_length=2, max_length=2)
    rows: int
    index: str


class _Data(BaseModel):
    """What describes the training rows; other facts are compared as they are."""

    sources: list[_Source] = []


class _SavedState(BaseModel):
    model_config = ConfigDict(strict=True)

    train_state: TrainState
    data: _Data = _Data()
    environment: dict[str, Any] = {}
    deepspeed: dict[str, Any] | None = None


def read_saved_state(folder: Path) -> dict[str, Any]:
    """Read state.json; empty for imported weights, which have none. Raises CheckpointError if it is damaged."""
    path = folder / STATE_NAME
    if not path.exists():
        return {}
    document = read_json_object(path, CheckpointError)
    try:
        state = _SavedState.model_validate_json(json.dumps(document)).train_state
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: damaged ({where}: {first['msg']}); use another checkpoint") from None
    if any(not 0 <= number < MAX_STEP for number in (state.step, state.rows_consumed, state.tokens, state.seconds)):
        raise CheckpointError(f"{path}: damaged (train_state has an impossible count); use another checkpoint")
    return {"data": {}, "environment": {}, **document}


def saved_state(folder: Path) -> TrainState:
    """Return the state of training of a checkpoint; the beginning for imported weights."""
    return TrainState.from_dict(read_saved_state(folder).get("train_state", {}))


def reached_words(folder: Path) -> int | None:
    """Return which of checkpoint.at_words a checkpoint was saved for; 0 for none, None if its state cannot be read."""
    try:
        return int(read_saved_state(folder).get("train_state", {}).get("reached_words", 0))
    except CheckpointError:
        return None


def phase_to_train(folder: Path | None, phases: Sequence[RunPhase]) -> int:
    """Return the number, from 0, of the phase that a run continues or begins after this checkpoint.

    Raises CheckpointError if the phases before it are not those of the recipe.
    """
    state = TrainState() if folder is None else saved_state(folder)
    if folder is None or (len(phases) == 1 and state.phase == 0):
        return 0
    lengths = [phase.config.training.max_steps for phase in phases]
    ends_early = [getattr(phase.config.schedule, "until_hours", None) is not None for phase in phases]
    before = STEPS_FOLLOW if any(ends_early[: state.phase]) else sum(lengths[: state.phase])
    if state.phase >= len(phases) or (before < STEPS_FOLLOW and before != state.first_step):
        raise CheckpointError(
            f"{folder} is in phase {state.phase + 1}, which began at step {state.first_step:,}; the recipe has "
            f"{counted(len(phases), 'phase')} of {', '.join(f'{steps:,}' for steps in lengths)} steps. A run cannot "
            "change the length of a phase that it has left: put it back, or branch off an earlier step with ctxlm fork"
        )
    phase = phases[state.phase]
    length, hours = lengths[state.phase], phase.phase.hours
    if phase.phase.words is not None:
        saved = load_saved_config(folder / "config.yaml").training
        length = saved.max_steps if saved.max_words == phase.phase.words else length
    over = state.step - state.first_step >= (state.decay[1] if state.decay else length)
    over = over or (hours is not None and state.seconds - state.first_seconds >= hours * 3600)
    return state.phase + 1 if over and not phase.is_last else state.phase


def refuse_changed_settings(folder: Path, config: RunConfig) -> None:
    """Raise CheckpointError for changes of the settings that a run cannot change, without data or an engine."""
    # Loading gives settings that are newer than the checkpoint their defaults.
    saved_config = load_saved_config(folder / "config.yaml")
    before, now = saved_config.flat(), config.flat()
    fixed = tuple(f"{name}." for name in (*saved_config.fixed_settings, *config.fixed_settings))
    changed = [
        f"  {key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in dict.fromkeys((*before, *now))
        if f"{key}.".startswith(fixed) and before.get(key) != now.get(key)
    ]
    if before.get("model.vocab_size") != now.get("model.vocab_size"):
        # The cause of the other size.
        paths = {
            "tokenizer.path": (saved_config.tokenizer.path, config.tokenizer.path),
            "data.train": [", ".join(source.path for source in one.data.train) for one in (saved_config, config)],
        }
        changed = [*(f"  {key}: {old} -> {new}" for key, (old, new) in paths.items() if old != new), *changed]
    _refuse(folder, changed + _changed_mix(saved_config.data.train, config.data.train))


def refuse_changed_data(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError if what describes the training rows is not what describes them in a checkpoint."""
    sources = enumerate(zip_longest(saved.get(SOURCES, []), now.get(SOURCES, [])))
    changed = [
        f"  data.train[{number}]: {_show_source(before)} in the checkpoint, {_show_source(after)} now"
        for number, (before, after) in sources
        if before is None or after is None or before["index"] != after["index"]
    ]
    changed += [
        f"  {key}: {saved.get(key)!r} in the checkpoint, {value!r} now"
        for key, value in now.items()
        if key != SOURCES and saved.get(key) != value
    ]
    _refuse(folder, changed)


def _changed_mix(saved: Sequence[TrainSource], current: Sequence[TrainSource]) -> list[str]:
    """Return a line for each change of weights, epochs or languages; paths may change: indexes say what is in them."""
    before, now = (
        [
            f"weight {source.weight}, epochs {source.epochs or 1.0:g}"
            + ("" if source.language is None else f", language {source.language}")
            for source in sources
        ]
        for sources in (saved, current)
    )
    if len(before) != len(now):
        return [f"  data.train: {counted(len(before), 'source')} -> {counted(len(now), 'source')}"]
    pairs = enumerate(zip(before, now, strict=True))
    return [f"  data.train[{number}]: {old} -> {new}" for number, (old, new) in pairs if old != new]


def _show_source(source: Mapping[str, Any] | None) -> str:
    if source is None:
        return "no source"
    first, last = source["documents"]
    return f"{source['path']} (documents {first} to {last}, {source['rows']} rows, samples {source['index'][:12]})"


def _refuse(folder: Path, changed: Sequence[str]) -> None:
    if changed:
        raise CheckpointError(
            f"{folder} cannot be continued with what has changed since:\n" + "\n".join(changed) + "\nPut the "
            "settings back; or start another run, with --set run_dir=NEW_FOLDER, and also initialize_from="
            f"{folder} if it begins with these weights"
        )


class Progress(NamedTuple):
    """Where a start of a run would resume."""

    step: int
    max_steps: int
    """STEPS_FOLLOW if words or hours give them and they are not known."""
    complete: bool

    def describe(self) -> str:
        """Return `resumes at step 20 of 100`, or that there is nothing to train."""
        what = "complete already:" if self.complete else "resumes at"
        return f"{what} step {self.step:,}" + (f" of {self.max_steps:,}" if self.max_steps != STEPS_FOLLOW else "")


def read_progress(run_dir: Path, config: RunConfig) -> Progress | None:
    """Return how far a run is; None without a checkpoint. Only the sizes of its files are compared, which is fast.

    Raises CheckpointError if none is intact or the recipe changes what this run cannot change.
    """
    newest = find_newest_intact(run_dir / CHECKPOINTS_DIR, partial(verify, quick=True), speaks=False)[0]
    if newest is None:
        return None
    recipe, phases, state = config, run_phases(config), saved_state(newest)
    number = phase_to_train(newest, phases)
    config = phases[state.phase].config
    # Only a start finds out the sizes and digests of its inputs.
    saved = load_saved_config(newest / "config.yaml")
    if config.model.vocab_size is None:
        vocabulary = {"vocab_size": saved.model.vocab_size}
        config = config.model_copy(update={"model": config.model.model_copy(update=vocabulary)})
    if config.teacher.fingerprint is None:
        teacher = {"fingerprint": saved.teacher.fingerprint}
        config = config.model_copy(update={"teacher": config.teacher.model_copy(update=teacher)})
    if config.training.max_steps == STEPS_FOLLOW and config.training.max_words == saved.training.max_words:
        config = config.with_values("training", max_steps=saved.training.max_steps)
    refuse_changed_settings(newest, config)
    limits, step = config.training, step_of(newest)
    words, hours = state.words - state.first_words, (state.seconds - state.first_seconds) / 3600
    spent = ((state.tokens, limits.max_tokens), (words, limits.max_words), (hours, phases[state.phase].phase.hours))
    enough = any(most is not None and done >= most for done, most in spent)
    is_last = number == state.phase == len(phases) - 1
    last_step = recipe.training.max_steps if recipe.phases else state.first_step + limits.max_steps
    return Progress(step, last_step, is_last and (step - state.first_step >= limits.max_steps or enough))


def report_resume(
    saved: RunConfig, config: RunConfig, step: int, environment: Sequence[str],
    json_settings: tuple[dict[str, Any], dict[str, Any]] = ({}, {}), *, log: bool = True, first_step: int = 0,
) -> list[str]:  # fmt: skip
    """Log how a resume after `step` steps differs from a run without an interruption, one line per changed setting.

    The phase of the recipes began at `first_step`. `environment` are other differences, as `name old -> new`, that
    change the rounding, `json_settings` the optimizer's of the DeepSpeed JSON before and now. Return every changed
    setting in the same form; without `log` that is all.
    """
    before, now = (each.flat() | of_json for each, of_json in zip((saved, config), json_settings, strict=True))
    # Another optimizer or schedule has other settings: its name says so.
    of_one_entry = {
        name
        for name in before.keys() ^ now.keys()
        if not name.startswith("deepspeed.")
        and any(key.startswith(name.partition(".")[0] + ".") for key in before.keys() & now.keys())
    }
    changes = {
        name: f"{name} {before.get(name)} -> {now.get(name)}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name) and name not in of_one_entry and not name.startswith(NOT_COMPARED)
    }
    if not log:
        return list(changes.values())
    old, new = (
        LearningRateSchedule(each.schedule, each.optimizer.learning_rate, each.training.max_steps)
        for each in (saved, config)
    )
    last, step = config.training.max_steps, step - first_step
    sample = [*range(step, last, max(1, (last - step) // COMPARED_RATES)), *range(max(step, last - 1), last)]
    rates = [(index, old.at(index), new.at(index)) for index in sample if old.at(index) != new.at(index)]
    curve = [name for name in changes if (rates if name.startswith(LEARNING_RATE) else name.startswith(CURVE))]
    rounding = [*environment, *(line for name, line in changes.items() if name.startswith(ROUNDING))]
    other = [line for name, line in changes.items() if name not in curve and not name.startswith(ROUNDING + LAYOUT)]
    if curve:
        at = ""
        if rates:
            index, was, now_is = rates[0]
            at = f" (learning rate of step {first_step + index + 1}: {was:.4g} -> {now_is:.4g})"
        logger.warning(
            "warning: this resume changes the training, so its curve is not that of an uninterrupted run%s:", at
        )
        for name in curve:
            logger.warning("  %s", changes[name])
    if rounding:
        # One line: mostly figures of the environment, which nobody set.
        how = "with other rounding" if curve else "exactly, but not bitwise"
        logger.info("resuming %s: %s", how, ", ".join(rounding))
    if other:
        logger.info("settings changed since the checkpoint, without effect on the training:")
        for line in other:
            logger.info("  %s", line)
    return list(changes.values())

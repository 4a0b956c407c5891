"""Settings that differ between a checkpoint and the run that resumes from it: what is logged, and how."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.schedules.schedule import LearningRateSchedule

logger = logging.getLogger("ctxlm_ds")

LEARNING_RATE = ("schedule.", "optimizer.learning_rate", "training.max_steps")
"""Settings that change the curve only if they change the rate of a step that is still to come."""
CURVE = ("optimizer.", "training.global_batch_size", "training.batch_ramp")
"""Other settings that change the curve."""
ROUNDING = ("kernels.", "training.compile", "training.grad_accum_dtype", "training.deterministic")
"""Settings that change the rounding."""
LAYOUT = ("parallel.", "deepspeed", "training.micro_batch_size", "training.precision")
"""Settings that the differences of the environment report."""
NOT_COMPARED = ("extends", "name", "run_dir", "initialize_from", "initialize_layers", "initialize_moments")
COMPARED_RATES = 100


def report_resume(
    saved: RunConfig, config: RunConfig, step: int, environment: Sequence[str], *, log: bool = True
) -> list[str]:
    """Log how a resume differs from a run without an interruption, one line per changed setting.

    Args:
        saved: the checkpoint's recipe.
        config: this start's recipe.
        step: steps that the checkpoint has done.
        environment: other differences, as `name old -> new`, that change the rounding.
        log: False on ranks that only return the changes.

    Returns:
        Every changed setting as `name old -> new`.
    """
    before, now = dict(_settings(saved.model_dump(mode="json"))), dict(_settings(config.model_dump(mode="json")))
    # Another optimizer or schedule has other settings: its name says so.
    of_one_entry = {
        name
        for name in before.keys() ^ now.keys()
        if any(key.startswith(name.partition(".")[0] + ".") for key in before.keys() & now.keys())
    }
    changes = {
        name: f"{name} {before.get(name)} -> {now.get(name)}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name) and name not in of_one_entry
    }
    if not log:
        return list(changes.values())
    old, new = (
        LearningRateSchedule(each.schedule, each.optimizer.learning_rate, each.training.max_steps)
        for each in (saved, config)
    )
    rates = list(_changed_rates(old, new, step, min(saved.training.max_steps, config.training.max_steps)))
    curve = [name for name in changes if (rates if name.startswith(LEARNING_RATE) else name.startswith(CURVE))]
    rounding = [*environment, *(line for name, line in changes.items() if name.startswith(ROUNDING))]
    other = [line for name, line in changes.items() if name not in curve and not name.startswith(ROUNDING + LAYOUT)]
    if curve:
        at = f" (learning rate of step {rates[0][0] + 1}: {rates[0][1]:.4g} -> {rates[0][2]:.4g})" if rates else ""
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
        logger.info("settings changed since the checkpoint, without effect on the curve:")
        for line in other:
            logger.info("  %s", line)
    return list(changes.values())


def _changed_rates(
    old: LearningRateSchedule, new: LearningRateSchedule, step: int, last: int
) -> Iterator[tuple[int, float, float]]:
    """Yield step, old rate and new rate for steps still to come (a sample of them) whose rate has changed."""
    for index in range(step, last, max(1, (last - step) // COMPARED_RATES)):
        if old.at(index) != new.at(index):
            yield index, old.at(index), new.at(index)


def _settings(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every setting by its full name."""
    for section, value in recipe.items():
        if isinstance(value, Mapping):
            yield from ((f"{section}.{name}", setting) for name, setting in value.items())
        elif section not in NOT_COMPARED:
            yield section, value

"""A sweep: a file with a line of settings for each task of a Slurm array. Task N of RUN/sweep.txt is the run RUN/N."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ctxlm_ds.errors import ConfigError

OPTION = "--sweep"
SWEEP_NAME = "sweep.txt"
TASK_VARIABLE = "CTXLM_SWEEP_TASK"
"""The task's number, also for a successor of its job, which is in no array."""


def read_sweep(path: Path) -> list[list[str]]:
    """Read the settings of each task; empty lines and comments are no tasks. Raises ConfigError without a task."""
    try:
        lines = [shlex.split(line, comments=True) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--sweep {path}: {getattr(error, 'strerror', None) or error}") from error
    tasks = [line for line in lines if line]
    for word in (word for task in tasks for word in task):
        if "=" not in word or word.startswith(("-", "run_dir=")):
            raise ConfigError(f"--sweep {path}: {word}: a line has settings as after --set, without run_dir: a.b=c ...")
    if not tasks:
        raise ConfigError(f"--sweep {path}: no line with settings; a line is a task: a.b=c ...")
    return tasks


def task_settings(path: Path, task: int) -> list[str]:
    """Return the settings of a task, its run directory among them. Raises ConfigError if there is no such task."""
    tasks = read_sweep(path)
    if task >= len(tasks):
        raise ConfigError(f"--sweep {path}: has the tasks 0 to {len(tasks) - 1}, and the job is number {task}")
    return [*tasks[task], f"run_dir={path.parent / str(task)}"]


def task_of(environ: Mapping[str, str]) -> str:
    """Return the number of the job's task, empty outside of an array."""
    return environ.get(TASK_VARIABLE) or environ.get("SLURM_ARRAY_TASK_ID", "")


def of_task(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Replace `--sweep FILE` by the settings of this job's task. Raises ConfigError outside of an array."""
    if OPTION not in arguments:
        return tuple(arguments)
    place, task = list(arguments).index(OPTION), task_of(environ)
    if not task.isdigit() or place + 1 == len(arguments):
        raise ConfigError(f"{OPTION} FILE needs an array; submit with: ctxlm submit RECIPE {OPTION} FILE")
    settings = task_settings(Path(arguments[place + 1]), int(task))
    return (*arguments[:place], *arguments[place + 2 :], "--set", *settings)

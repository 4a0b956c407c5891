"""A sweep: a file with a line of settings for each task of a Slurm array. Task N of RUN/sweep.txt is the run RUN/N."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.problems import shortened
from ctxlm_ds.untrusted_json import read_text

OPTION = "--sweep"
SWEEP_NAME = "sweep.txt"
RUN_DIR = "run_dir="
MAX_TASKS = 10_000


@dataclass(frozen=True)
class SweepTask:
    """A task of a sweep: its number, where its line is (`lr.txt:2`), and the line's settings."""

    number: int
    place: str
    settings: list[str]

    def settings_in(self, folder: Path) -> list[str]:
        """Return the settings with the task's run directory, in the folder of the sweep's runs."""
        return [*self.settings, f"{RUN_DIR}{folder / str(self.number)}"]


def read_sweep(path: Path) -> list[SweepTask]:
    """Read the tasks, not empty lines and comments. Raises ConfigError without a task or for a wrong line."""
    tasks: list[SweepTask] = []
    for number, line in enumerate(read_text(path, ConfigError).split("\n"), 1):
        place = f"{path}:{number}"
        try:
            settings = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"--sweep {place}: {error}") from error
        for word in settings:
            if "=" not in word or word.startswith(("-", RUN_DIR)):
                message = "a line has settings as after --set, without run_dir: a.b=c"
                raise ConfigError(f"--sweep {place}: {shortened(word)}: {message}")
        tasks += [SweepTask(len(tasks), place, settings)] if settings else []
        if len(tasks) > MAX_TASKS:
            raise ConfigError(f"--sweep {path}: more than {MAX_TASKS:,} tasks; make several sweeps of it")
    if not tasks:
        raise ConfigError(f"--sweep {path}: no line with settings; a line is a task: a.b=c ...")
    return tasks


def tasks_of_array(text: str) -> list[range]:
    """Return the ranges of sbatch's --array: `0-3,7%2`, `0-15:4`. Raises ConfigError for other texts."""
    tasks = []
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", part)
        if match is None:
            raise ConfigError(f"--array={shortened(text)}: expected numbers and ranges, such as 0-3,7")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        tasks.append(range(first, last + 1, max(1, step)))
    return tasks


def of_task(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Replace `--sweep FILE` by the settings of this job's task. Raises ConfigError without such a task."""
    if OPTION not in arguments:
        return tuple(arguments)
    place, number = list(arguments).index(OPTION), environ.get("SLURM_ARRAY_TASK_ID", "")
    if not number.isdigit() or place + 1 == len(arguments):
        raise ConfigError(f"{OPTION} FILE needs an array; submit with: ctxlm submit RECIPE {OPTION} FILE")
    path = Path(arguments[place + 1])
    tasks = read_sweep(path)
    if int(number) >= len(tasks):
        raise ConfigError(f"--sweep {path}: has the tasks 0 to {len(tasks) - 1}, and the job is number {number}")
    settings = tasks[int(number)].settings_in(path.parent)
    # The command's run_dir, that of all tasks, would be reported as replaced.
    others = [*arguments[:place], *arguments[place + 2 :]]
    others = [settings[-1] if word.startswith(RUN_DIR) else word for word in others]
    return (*others, "--set", *settings)

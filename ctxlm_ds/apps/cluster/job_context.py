"""A job's ids, nodes, tasks, run and settings (variables of slurm/env.sh), its signals, and the lines of its log.

A sweep is a file with a line of settings for each task of a Slurm array. Task N of RUN/sweep.txt is the run RUN/N.

The recipe check needs pydantic and PyYAML: if the ranks have a container, `python -m ctxlm_ds.apps.cluster.job_context`
runs it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ctxlm_ds.console import run_command
from ctxlm_ds.errors import EXIT_USER_ERROR, CheckpointError, ClusterError, ConfigError
from ctxlm_ds.installed import check_installed
from ctxlm_ds.process.slurm import expand_hostlist, expand_tasks
from ctxlm_ds.recipe.problems import shortened
from ctxlm_ds.untrusted_json import read_text

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
EARLY_VARIABLE = "CTXLM_NOTICE"
MARK = "ctxlm-run-folder "
TIMEOUT_S = 600.0
RESTART_MODES = ("requeue", "off")
SWEEP_OPTION = "--sweep"
SWEEP_NAME = "sweep.txt"
RUN_DIR = "run_dir="
MAX_TASKS = 10_000


def show(text: str) -> None:
    """Print one line of the job's readable log; a full disk loses the line and nothing else."""
    with contextlib.suppress(OSError):
        # Not through sys.stdout, which would keep what could not be written and make Python end with an error.
        os.write(1, (text + "\n").encode(errors="replace"))


def log(text: str) -> None:
    """Print one line of the job itself, between those of the ranks."""
    show(f"{time.strftime('%H:%M:%S')} job: {text}")


class JobSignals:
    """The signals that the job has got. Install it before anything slow: until then they are lost."""

    def __init__(self) -> None:
        self.name = os.environ.pop(EARLY_VARIABLE, "")
        """The signal that came last; empty if none came."""
        self.count = 1 if self.name else 0

    def __bool__(self) -> bool:
        return bool(self.count)

    def install(self) -> JobSignals:
        """Handle the signals from now on (main thread only)."""
        for number in SIGNALS:
            signal.signal(number, self._handle)
        return self

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until a signal comes."""
        end_s, count = time.monotonic() + seconds, self.count
        while time.monotonic() < end_s and self.count == count:
            time.sleep(min(0.1, seconds))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self.count += 1


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
    if SWEEP_OPTION not in arguments:
        return tuple(arguments)
    place, number = list(arguments).index(SWEEP_OPTION), environ.get("SLURM_ARRAY_TASK_ID", "")
    if not number.isdigit() or place + 1 == len(arguments):
        raise ConfigError(f"{SWEEP_OPTION} FILE needs an array; submit with: ctxlm submit RECIPE {SWEEP_OPTION} FILE")
    path = Path(arguments[place + 1])
    tasks = read_sweep(path)
    if int(number) >= len(tasks):
        raise ConfigError(f"--sweep {path}: has the tasks 0 to {len(tasks) - 1}, and the job is number {number}")
    settings = tasks[int(number)].settings_in(path.parent)
    # The command's run_dir, that of all tasks, would be reported as replaced.
    others = [*arguments[:place], *arguments[place + 2 :]]
    others = [settings[-1] if word.startswith(RUN_DIR) else word for word in others]
    return (*others, "--set", *settings)


@dataclass(frozen=True)
class JobSettings:
    """How a job starts its ranks, and what it does when they end early."""

    restarts: bool = True
    max_restarts: int = 4  # starts in a row that leave no new checkpoint before the job gives up
    restart_delay_s: float = 10.0
    """Pause before a restart in this allocation, four times longer with each start without progress."""
    srun_options: tuple[str, ...] = ()
    of_srun: tuple[str, ...] = ()  # srun's options for an image of pyxis
    inside: tuple[str, ...] = ()  # words before a command that run it in an image of apptainer
    python: str = sys.executable  # of the ranks


def read_settings(environ: Mapping[str, str]) -> JobSettings:
    """Read the settings from the environment. Raises ConfigError for an impossible value."""
    restart = environ.get("CTXLM_RESTART") or "requeue"
    if restart not in RESTART_MODES:
        raise ConfigError(f"CTXLM_RESTART={restart}: expected one of {', '.join(RESTART_MODES)}")
    container, pyxis = environ.get("CTXLM_CONTAINER", ""), environ.get("CTXLM_PYXIS", "")
    if container and pyxis:
        raise ConfigError(f"CTXLM_CONTAINER={container} and CTXLM_PYXIS={pyxis}: set one of them in slurm/env.sh")
    enter = ("apptainer", "exec", "--nv", *_words(environ, "CTXLM_CONTAINER_OPTIONS"), container)
    of_srun = (f"--container-image={pyxis}", *_words(environ, "CTXLM_PYXIS_OPTIONS"))
    return JobSettings(
        restarts=restart != "off",
        max_restarts=int(_number(environ, "CTXLM_MAX_RESTARTS", 4, lowest=1)),
        restart_delay_s=_number(environ, "CTXLM_RESTART_DELAY_S", 10.0, lowest=0),
        srun_options=_words(environ, "CTXLM_SRUN_OPTIONS"),
        of_srun=of_srun if pyxis else (),
        inside=enter if container else (),
        python=environ.get("CTXLM_CONTAINER_PYTHON") or "python3" if container or pyxis else sys.executable,
    )


def _number(environ: Mapping[str, str], name: str, default: float, lowest: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = lowest - 1
    if not value >= lowest:
        raise ConfigError(f"{name}={text}: expected a number, {lowest:g} or more")
    return value


def _words(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(environ.get(name, "")))
    except ValueError as error:
        raise ConfigError(f"{name}={environ[name]}: {error}") from error


@dataclass(frozen=True)
class JobContext:
    """One job, from the batch script to its end."""

    job_id: str
    restarts: int  # how often Slurm had requeued the job when it began this time
    node_list: str
    nodes: tuple[str, ...]  # the ranks' nodes, rank 0's first
    task_words: tuple[str, ...]  # srun's options for the number of ranks
    words: tuple[str, ...]  # those of ctxlm_ds.pretrain
    run_dir: Path  # absolute, or relative to the working directory, as in the recipe
    max_steps: int
    settings: JobSettings
    environ: Mapping[str, str]
    in_series: bool = False
    """True for a task of an array without a sweep: all tasks are the same run, one at a time."""

    @property
    def is_followed(self) -> bool:
        """Whether a later task of the array continues the run."""
        task, last = (self.environ.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("ID", "MAX"))
        return self.in_series and task != last


def read_context(arguments: Sequence[str]) -> JobContext:
    """Read the job's environment and check the recipe. Raises ConfigError without a job or a correct recipe."""
    environ = dict(os.environ)
    if not environ.get("SLURM_JOB_ID") or not environ.get("SLURM_JOB_NODELIST"):
        raise ConfigError("this is no Slurm job; submit it with: sbatch slurm/pretrain.sbatch RECIPE.yaml")
    words = pretrain_words(of_task(arguments, environ))
    settings = read_settings(environ)
    tasks, task_words = plan_tasks(environ)
    run_dir, max_steps = find_run(words, sum(tasks.values()), settings, environ)
    return JobContext(
        job_id=environ["SLURM_JOB_ID"],
        restarts=int(environ.get("SLURM_RESTART_COUNT") or "0"),
        node_list=environ["SLURM_JOB_NODELIST"],
        nodes=tuple(tasks),
        task_words=task_words,
        words=words,
        run_dir=Path(run_dir),
        max_steps=max_steps,
        settings=settings,
        environ=environ,
        in_series="SLURM_ARRAY_TASK_ID" in environ and SWEEP_OPTION not in arguments,
    )


def pretrain_words(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return ctxlm_ds.pretrain's arguments from the batch script's. Raises ConfigError without a recipe."""
    named = any(word.startswith("--config") for word in arguments)
    if not arguments or (arguments[0].startswith("-") and not named):
        raise ConfigError("no recipe; it comes first: sbatch slurm/pretrain.sbatch RECIPE.yaml [--set a.b=c ...]")
    words = tuple(arguments) if arguments[0].startswith("-") else ("--config", *arguments)
    if "--check" in words:
        raise ConfigError(
            f"--check needs no job: python -m ctxlm_ds.pretrain {' '.join(words)} --world-size RANKS (a job checks its "
            "recipe before anything else)"
        )
    return words


def plan_tasks(environ: Mapping[str, str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the ranks of each node and srun's options for them: the job's tasks, or one per GPU of each single task.

    Raises ConfigError if the job has too few CPUs for that.
    """
    nodes = expand_hostlist(environ["SLURM_JOB_NODELIST"])
    counts = expand_tasks(environ.get("SLURM_TASKS_PER_NODE") or f"1(x{len(nodes)})")
    tasks = dict(zip(nodes, counts, strict=False))
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    num_gpus = int(gpus) if gpus.isdigit() else 0
    if set(counts) != {1} or num_gpus <= 1:
        return tasks, ()
    cpus = environ.get("SLURM_CPUS_ON_NODE", "")
    if not cpus.isdigit() or int(cpus) < num_gpus:
        raise ConfigError(
            f"each node has {num_gpus} GPUs but one task, and {cpus or 'too few'} CPUs for more; submit with "
            f"--ntasks-per-node={num_gpus}"
        )
    each = min(expand_tasks(environ.get("SLURM_JOB_CPUS_PER_NODE") or cpus)) // num_gpus
    options = (f"--ntasks={num_gpus * len(nodes)}", f"--ntasks-per-node={num_gpus}", f"--cpus-per-task={max(1, each)}")
    return dict.fromkeys(nodes, num_gpus), options


def find_run(
    words: Sequence[str], world_size: int, settings: JobSettings, environ: Mapping[str, str]
) -> tuple[str, int]:
    """Check the recipe and return the folder of its run and the number of steps.

    Raises ConfigError for a mistake (which a container has explained already), ClusterError if no container can run.
    """
    if not settings.inside and not settings.of_srun:
        return read_recipe(words, world_size)
    one_task = ["srun", "--nodes=1", "--ntasks=1", *settings.of_srun] if settings.of_srun else settings.inside
    command = [*one_task, settings.python, "-m", "ctxlm_ds.apps.cluster.job_context", str(world_size), *words]
    try:
        done = subprocess.run(
            command, env=dict(environ), stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise ClusterError(f"{command[0]}: not found; load it in slurm/env.sh") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(command)}: no answer within {TIMEOUT_S:.0f} s") from None
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            run_dir, max_steps = json.loads(line[len(MARK) :])
            return run_dir, max_steps
    if done.returncode == EXIT_USER_ERROR:
        raise ConfigError("the recipe was refused; see above")
    raise ClusterError(f"the container cannot run python (status {done.returncode}); tried: {' '.join(command)}")


def read_recipe(words: Sequence[str], world_size: int) -> tuple[str, int]:
    """Check the recipe in this process; return the run's folder and the number of steps."""
    check_installed()
    from ctxlm_ds.apps.plan.check_run import parse_arguments
    from ctxlm_ds.checkpoint.saved_state import read_progress
    from ctxlm_ds.recipe.check import check_config
    from ctxlm_ds.recipe.load import load_config
    from ctxlm_ds.recipe.phases import run_phases

    arguments = parse_arguments(words)
    config = load_config(arguments.config, arguments.set)
    for phase in run_phases(config, world_size):
        check_config(phase.config, world_size)
    with contextlib.suppress(CheckpointError):  # words, tokens or hours may have ended the run
        if (progress := read_progress(config.directory, config)) is not None and progress.complete:
            return str(config.directory), progress.step
    return str(config.directory), config.training.max_steps


def main() -> None:
    """Print the answer for WORLD_SIZE WORDS... as one marked line."""
    found = read_recipe(sys.argv[2:], int(sys.argv[1]))
    sys.stdout.write(MARK + json.dumps(found) + "\n")


if __name__ == "__main__":
    run_command(main)

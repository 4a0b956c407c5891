"""A job's ids, nodes, tasks, run and settings, the signals that it gets, and the lines of its log.

The recipe check needs pydantic and PyYAML: if the ranks have a container, `python -m ctxlm_ds.apps.cluster.job_context`
runs it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ctxlm_ds.apps.cluster.settings import JobSettings, read_settings
from ctxlm_ds.apps.cluster.srun import wrap_in_container
from ctxlm_ds.apps.cluster.sweep import TASK_VARIABLE, of_task, task_of
from ctxlm_ds.console import run_command
from ctxlm_ds.errors import EXIT_USER_ERROR, ClusterError, ConfigError
from ctxlm_ds.installed import check_installed
from ctxlm_ds.process.lock_record import CHAIN_VARIABLE
from ctxlm_ds.process.slurm import expand_hostlist, expand_tasks

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
EARLY_VARIABLE = "CTXLM_NOTICE"
MARK = "ctxlm-run-folder "
TIMEOUT_S = 600.0


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
        self.name = "a signal at the job's beginning" if os.environ.pop(EARLY_VARIABLE, "") else ""
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
class JobContext:
    """One job, from the batch script to its end."""

    job_id: str
    chain: str  # id of the first job in a line of successors
    restarts: int  # how often Slurm had requeued the job when it began this time
    node_list: str
    tasks: Mapping[str, int]  # ranks of each node, in the allocation's order
    task_words: tuple[str, ...]  # srun's options to start so many
    arguments: tuple[str, ...]  # those of the batch script
    words: tuple[str, ...]  # those of ctxlm_ds.pretrain
    run_dir: Path  # absolute, or relative to the working directory, as in the recipe
    max_steps: int
    settings: JobSettings
    environ: Mapping[str, str]


def read_context(arguments: Sequence[str]) -> JobContext:
    """Read the job's environment and check the recipe. Raises ConfigError without a job or a correct recipe."""
    environ = dict(os.environ)
    if not environ.get("SLURM_JOB_ID") or not environ.get("SLURM_JOB_NODELIST"):
        raise ConfigError("this is no Slurm job; submit it with: sbatch slurm/pretrain.sbatch RECIPE.yaml")
    words = pretrain_words(of_task(arguments, environ))
    environ |= {TASK_VARIABLE: task} if (task := task_of(environ)) else {}
    settings = read_settings(environ)
    tasks, task_words = plan_tasks(environ)
    run_dir, max_steps = find_run(words, sum(tasks.values()), settings, environ)
    return JobContext(
        job_id=environ["SLURM_JOB_ID"],
        chain=environ.get(CHAIN_VARIABLE) or environ["SLURM_JOB_ID"],
        restarts=int(environ.get("SLURM_RESTART_COUNT") or "0"),
        node_list=environ["SLURM_JOB_NODELIST"],
        tasks=tasks,
        task_words=task_words,
        arguments=tuple(arguments),
        words=words,
        run_dir=Path(run_dir),
        max_steps=max_steps,
        settings=settings,
        environ=environ,
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
    """Return the ranks of each node and srun's options for them.

    They are the job's tasks, or one per GPU if the job has one task per node. Raises ConfigError if it has too few CPUs
    for that.
    """
    nodes = expand_hostlist(environ["SLURM_JOB_NODELIST"])
    counts = expand_tasks(environ.get("SLURM_TASKS_PER_NODE") or f"1(x{len(nodes)})")
    tasks = {node: count for node, count in zip(nodes, counts)}  # noqa: B905 (Python 3.9 runs this)
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
    options = (f"--ntasks={num_gpus * len(nodes)}", f"--ntasks-per-node={num_gpus}", "--cpus-per-task=1")
    return {node: num_gpus for node in nodes}, options


def find_run(
    words: Sequence[str], world_size: int, settings: JobSettings, environ: Mapping[str, str]
) -> tuple[str, int]:
    """Check the recipe and return the folder of its run and the number of steps.

    Raises:
        ConfigError: the recipe or the options are wrong (a container has printed its message already).
        ClusterError: the container cannot run.
    """
    if not settings.container and not settings.pyxis:
        check_installed()
        return read_recipe(words, world_size)
    inner = [settings.container_python, "-m", "ctxlm_ds.apps.cluster.job_context", str(world_size), *words]
    options, inside = wrap_in_container(inner, settings)
    command = ["srun", "--nodes=1", "--ntasks=1", *options, *inside] if settings.pyxis else inside
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
    from ctxlm_ds.apps.plan.check_run import parse_arguments
    from ctxlm_ds.recipe.check import check_config
    from ctxlm_ds.recipe.load import load_config

    arguments = parse_arguments(words)
    config = load_config(arguments.config, arguments.set)
    check_config(config, world_size)
    return str(config.directory), config.training.max_steps


def main() -> None:
    """Print the answer for WORLD_SIZE WORDS... as one marked line."""
    check_installed()
    found = read_recipe(sys.argv[2:], int(sys.argv[1]))
    sys.stdout.write(MARK + json.dumps(found) + "\n")


if __name__ == "__main__":
    run_command(main)

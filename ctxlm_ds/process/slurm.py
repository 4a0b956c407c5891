"""What srun tells a task: its place among the tasks, its peers' hosts, a port for them to meet. No scontrol needed.

Also numbers as Slurm and people write them: `0-2,5` for 0, 1, 2, 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ctxlm_ds.errors import ConfigError

# Below the ephemeral ports of Linux (32768 up) and Kubernetes' node ports (30000 up), above the usual services.
FIRST_PORT = 15000
NUM_PORTS = 15000
# Batch, interactive and external steps have ids from here up; their processes are no ranks.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
SPECIAL_STEP_NAMES = ("batch", "interactive", "extern")

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class SlurmTask:
    """One task of a job step."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hosts: tuple[str, ...]
    port: int


def is_srun_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a rank.

    A shell inside salloc or sbatch has most of the same variables; so has a shell on a terminal that srun gave it.
    """
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ or "SLURM_PTY_PORT" in environ:
        return False
    if environ.get("SLURM_STEP_NAME") in SPECIAL_STEP_NAMES:
        return False
    step = environ["SLURM_STEP_ID"]
    return step.isdigit() and int(step) < FIRST_SPECIAL_STEP


def read_task(environ: Mapping[str, str]) -> SlurmTask:
    """The task that srun's variables describe.

    Raises:
        ConfigError: a variable is missing or makes no sense.
    """
    rank = _number(environ, "SLURM_PROCID")
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _number(environ, tasks)
    if not rank < world_size:
        raise ConfigError(f"SLURM_PROCID is {rank} but {tasks} is {world_size}; start the ranks with a plain srun")
    hosts: tuple[str, ...] = ("127.0.0.1",)
    if world_size > 1:
        hosts = tuple(expand_hostlist(_nodelist(environ)))
    return SlurmTask(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=_local_tasks(environ, world_size, len(hosts)),
        hosts=hosts,
        port=port_of_step(environ),
    )


def port_of_step(environ: Mapping[str, str]) -> int:
    """A port that every task of a step computes alike, and that neighbouring jobs, steps and restarts do not share."""
    job = _number(environ, "SLURM_JOB_ID")
    step = int(environ.get("SLURM_STEP_ID", "0"))
    restart = int(environ.get("SLURM_RESTART_COUNT") or "0")
    return FIRST_PORT + (job * 101 + step * 7 + restart) % NUM_PORTS


def expand_hostlist(text: str) -> list[str]:
    """`node[01-03,7],login` -> node01, node02, node03, node7, login; several brackets a name are allowed.

    Raises:
        ConfigError: unbalanced brackets or a range that is none.
    """
    hosts: list[str] = []
    for name in _split_outside_brackets(text):
        hosts += _expand_name(name, text)
    if not hosts:
        raise ConfigError(f"SLURM's node list is empty ({text!r})")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if not 0 <= depth <= 1:
            raise ConfigError(f"SLURM's node list {text!r} has unbalanced brackets")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise ConfigError(f"SLURM's node list {text!r} has unbalanced brackets")
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _expand_name(name: str, text: str) -> list[str]:
    match = _BRACKETS.search(name)
    if match is None:
        return [name]
    prefix, rest = name[: match.start()], name[match.end() :]
    tails = _expand_name(rest, text)
    try:
        return [prefix + number + tail for number in expand_numbers(match[1]) for tail in tails]
    except ValueError as error:
        raise ConfigError(f"SLURM's node list {text!r}: {error}") from None


def expand_tasks(text: str) -> list[int]:
    """Tasks a node: `2(x3),1` -> 2, 2, 2, 1."""
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None:
            raise ConfigError(f"SLURM's tasks per node {text!r}: {item!r} is not a count like 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _nodelist(environ: Mapping[str, str]) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return environ[name]
    raise ConfigError("SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are missing; start the ranks with srun --export=ALL")


def _local_tasks(environ: Mapping[str, str], world_size: int, num_hosts: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if environ.get(name):
            counts = expand_tasks(environ[name])
            node = int(environ.get("SLURM_NODEID") or "0")
            # The job's list, used where the step's is missing, may describe other nodes.
            if sum(counts) == world_size and node < len(counts):
                return counts[node]
    return -(-world_size // num_hosts)


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value.isdigit():
        found = repr(value) if value else "missing"
        raise ConfigError(f"{name} is {found}, a number is expected; start the ranks with srun --export=ALL")
    return int(value)


def expand_numbers(text: str) -> list[str]:
    """Expand `08-10,3` to 08, 09, 10, 3; leading zeros stay.

    Raises:
        ValueError: an item is not a number or a range, or a range runs backwards; names the item.
    """
    numbers: list[str] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{item!r} is not a number or a range")
        end = int(last) if dash else int(first)
        if end < int(first):
            raise ValueError(f"the range {item!r} runs backwards")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), end + 1)]
    return numbers


def join_numbers(numbers: Iterable[int], separator: str = ",") -> str:
    """Join ascending numbers as ranges: `[0, 1, 2, 5]` -> `0-2,5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in spans)

"""A task's place in a job step from srun's variables: rank, peers' hosts, and a port to meet, without scontrol.

Also numbers as Slurm and people write them: `0-2,5` for 0, 1, 2, 5. And the interface for gloo, which listens on the
address of the host's name. Debian and Ubuntu write that name into /etc/hosts as 127.0.1.1, which other nodes cannot
reach: the ranks would wait for each other until a time limit. NCCL looks at the interfaces themselves.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import product

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.launch import Launcher, RankInfo, free_port

# Below the ephemeral ports of Linux (32768 up) and Kubernetes' node ports (30000 up), above the usual services.
FIRST_PORT = 15000
NUM_PORTS = 15000
# Batch, interactive and external steps have ids from here up; their processes are no ranks.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
SPECIAL_STEP_NAMES = ("batch", "interactive", "extern")

VARIABLE = "GLOO_SOCKET_IFNAME"
_ANY_PORT = 9
_HOSTS = re.compile(r"(?:[^,\[\]]+|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class Srun(Launcher):
    """srun, which ends all tasks of a step by itself."""

    def has_started(self, environ: Mapping[str, str]) -> bool:
        """Return whether srun started this process as a rank.

        A shell inside salloc or sbatch, or on a terminal of srun, has most of the same variables.
        """
        if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ or "SLURM_PTY_PORT" in environ:
            return False
        step = environ["SLURM_STEP_ID"]
        special = environ.get("SLURM_STEP_NAME") in SPECIAL_STEP_NAMES
        return not special and step.isdigit() and int(step) < FIRST_SPECIAL_STEP

    def place(self, environ: Mapping[str, str]) -> RankInfo:
        """Read a task's place from srun's variables. Raises ConfigError if one is missing or wrong."""
        rank = read_number(environ, "SLURM_PROCID")
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        world_size = read_number(environ, tasks)
        if not rank < world_size:
            raise ConfigError(f"SLURM_PROCID is {rank} but {tasks} is {world_size}; start the ranks with a plain srun")
        hosts = hosts_of_step(environ) if world_size > 1 else ["127.0.0.1"]
        address = hosts[0] if len(hosts) > 1 else "127.0.0.1"
        port = port_of_step(environ) if world_size > 1 else free_port()
        visible, local_rank = environ.get("CUDA_VISIBLE_DEVICES", ""), read_number(environ, "SLURM_LOCALID")
        return RankInfo(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=_local_tasks(environ, world_size, len(hosts)),
            master_addr=environ.get("MASTER_ADDR") or address,
            master_port=read_number(environ, "MASTER_PORT", str(port)),
            launcher="",
            device_index=0 if visible and "," not in visible else local_rank,
        )

    def prepare(self, ranks: RankInfo) -> None:
        if ranks.world_size > ranks.local_world_size:
            choose_gloo_interface((*hosts_of_step(os.environ), ranks.master_addr), os.environ)


SRUN = Srun()


def hosts_of_step(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of the step, or of the job if the step's are missing."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next(filter(None, map(environ.get, names)), None)
    if nodes is None:
        raise ConfigError(f"{names[0]} and {names[1]} are missing; start the ranks with srun --export=ALL")
    return expand_hostlist(nodes)


def port_of_step(environ: Mapping[str, str]) -> int:
    """Compute a port, the same for every task of a step, that neighbouring jobs, steps and restarts do not share."""
    job = read_number(environ, "SLURM_JOB_ID")
    step = int(environ.get("SLURM_STEP_ID", "0"))
    restart = int(environ.get("SLURM_RESTART_COUNT") or "0")
    return FIRST_PORT + (job * 101 + step * 7 + restart) % NUM_PORTS


def expand_hostlist(text: str) -> list[str]:
    """Expand `node[01-03,7],login` to node01, node02, node03, node7, login. Raises ConfigError for a wrong list."""
    if "[" in _HOSTS.sub("", text) or "]" in _HOSTS.sub("", text):
        raise ConfigError(f"SLURM's node list {text!r} has unbalanced brackets")
    hosts: list[str] = []
    try:
        for name in _HOSTS.findall(text):
            parts = [
                expand_numbers(numbers) if not fixed else [fixed] for numbers, fixed in _PARTS.findall(name.strip())
            ]
            hosts += ["".join(pieces) for pieces in product(*parts) if pieces]
    except ValueError as error:
        raise ConfigError(f"SLURM's node list {text!r}: {error}") from None
    if not hosts:
        raise ConfigError(f"SLURM's node list is empty ({text!r})")
    return hosts


def expand_tasks(text: str) -> list[int]:
    """Expand the tasks per node, `2(x3),1`, to 2, 2, 2, 1."""
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None:
            raise ConfigError(f"SLURM's tasks per node {text!r}: {item!r} is not a count like 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _local_tasks(environ: Mapping[str, str], world_size: int, num_hosts: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if environ.get(name):
            counts = expand_tasks(environ[name])
            node = int(environ.get("SLURM_NODEID") or "0")
            # The job's list, used if the step's is missing, may describe other nodes.
            if sum(counts) == world_size and node < len(counts):
                return counts[node]
    return -(-world_size // num_hosts)


def read_number(
    environ: Mapping[str, str], name: str, default: str = "", remedy: str = "start the ranks with srun --export=ALL"
) -> int:
    """Read a variable. Raises ConfigError, which gives the remedy, if it is missing or no number."""
    value = environ.get(name) or default
    if not value.isdigit():
        raise ConfigError(f"{name} is {repr(value) if value else 'missing'}, a number is expected; {remedy}")
    return int(value)


def expand_numbers(text: str) -> list[str]:
    """Expand `08-10,3` to 08, 09, 10, 3; leading zeros stay. Raises ValueError for an item that is no range."""
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


def choose_gloo_interface(hosts: Sequence[str], environ: MutableMapping[str, str]) -> str | None:
    """Set GLOO_SOCKET_IFNAME if the host's name does not lead to an address that the others can reach.

    Returns the interface that was set; None if there is no need, or no other host is known by name.
    """
    if len(hosts) < 2 or VARIABLE in environ:
        return None
    with contextlib.suppress(OSError):  # the host's name has no address
        # Where gloo would listen.
        if not _is_loopback(str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])):
            return None
    for host in hosts:
        address = _address_towards(host)
        name = None if _is_loopback(address) else interface_of(address)
        if name is not None:
            environ[VARIABLE] = name
            return name
    return None


def interface_of(address: str) -> str | None:
    import psutil

    found = psutil.net_if_addrs().items()
    return next((name for name, entries in found if any(entry.address == address for entry in entries)), None)


def _address_towards(host: str) -> str:
    """Return the address from which this machine would speak to a host; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        unused.connect((host, _ANY_PORT))
        return str(unused.getsockname()[0])
    return ""


def _is_loopback(address: str) -> bool:
    return not address or address.startswith("127.") or address == "::1"

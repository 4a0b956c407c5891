"""Which rank this process is, under any launcher, and what a process must set up before torch is imported.

gloo listens on the address of the host's name. Debian and Ubuntu write that name into /etc/hosts as 127.0.1.1, which
other nodes cannot reach: the ranks would wait for each other until a time limit. NCCL looks at the interfaces
themselves and needs no help.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.allocator import keep_freed_memory
from ctxlm_ds.process.build_locks import clear_stale_build_locks, use_own_build_folder
from ctxlm_ds.process.cgroups import available_cores
from ctxlm_ds.process.launcher import die_with_launcher, interrupted, take_terminal
from ctxlm_ds.process.library_noise import quiet_libraries
from ctxlm_ds.process.output_log import say
from ctxlm_ds.process.run_history import in_job
from ctxlm_ds.process.slurm import is_srun_task, read_number, read_task

logger = logging.getLogger("ctxlm_ds")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
VARIABLE = "GLOO_SOCKET_IFNAME"
LOCAL_RANKS = "CTXLM_LOCAL_RANKS"
"""Variable of ranks that `--ranks` has started (process/local_ranks.py)."""
_ANY_PORT = 9


@dataclass(frozen=True)
class RankInfo:
    """One process among those of a run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: Literal["deepspeed", "torchrun", "srun", "ranks", "environment", "single"]
    device_index: int
    """Accelerator of this rank among those it sees: its local rank, or 0 if each task sees a single one."""


def discover_ranks(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Find this process's place from the variables of DeepSpeed, torchrun or srun; without any it is alone.

    Raises ConfigError if variables are missing, are no numbers, or contradict each other.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_launcher(environ)
    if is_srun_task(environ):
        return _from_srun(environ)
    return RankInfo(0, 1, 0, 1, "127.0.0.1", free_port(), "single", 0)


def _from_launcher(environ: Mapping[str, str]) -> RankInfo:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    alone = world_size == 1
    if rank >= world_size:
        raise ConfigError(f"RANK is {rank} but WORLD_SIZE is {world_size}; unset both to run one process")
    local_rank = _number(environ, "LOCAL_RANK", "0" if alone else "")
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else "")
    if not address:
        raise ConfigError("MASTER_ADDR is missing although WORLD_SIZE is set; set it to the host of rank 0")
    port = free_port() if alone and "MASTER_PORT" not in environ else _number(environ, "MASTER_PORT")
    # DeepSpeed's launcher says LOCAL_SIZE.
    unknown = str(world_size if address in LOOPBACK else 1)
    local_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "LOCAL_SIZE"
    local_world_size = _number(environ, local_name, unknown)
    launcher: Literal["deepspeed", "torchrun", "ranks", "environment"] = "environment"
    if LOCAL_RANKS in environ:
        launcher = "ranks"
    elif "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    elif "CROSS_RANK" in environ:
        launcher = "deepspeed"
    return RankInfo(rank, world_size, local_rank, local_world_size, address, port, launcher, local_rank)


def _from_srun(environ: Mapping[str, str]) -> RankInfo:
    task = read_task(environ)
    address = task.hosts[0] if len(task.hosts) > 1 else "127.0.0.1"
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    own_device = bool(visible) and "," not in visible
    return RankInfo(
        rank=task.rank,
        world_size=task.world_size,
        local_rank=task.local_rank,
        local_world_size=task.local_world_size,
        master_addr=environ.get("MASTER_ADDR") or address,
        master_port=_number(environ, "MASTER_PORT", str(task.port if task.world_size > 1 else free_port())),
        launcher="srun",
        device_index=0 if own_device else task.local_rank,
    )


def export_ranks(ranks: RankInfo, environ: MutableMapping[str, str] | None = None) -> None:
    """Set what torch.distributed and DeepSpeed read; without RANK and the rest DeepSpeed would look for MPI.

    LOCAL_RANK is the device index, because DeepSpeed uses it as such.
    """
    environ = os.environ if environ is None else environ
    environ.update(
        RANK=str(ranks.rank),
        WORLD_SIZE=str(ranks.world_size),
        LOCAL_RANK=str(ranks.device_index),
        LOCAL_WORLD_SIZE=str(ranks.local_world_size),
        MASTER_ADDR=ranks.master_addr,
        MASTER_PORT=str(ranks.master_port),
    )


def prepare_process(ranks: RankInfo, deterministic: bool = False, one_queue: bool = False) -> int:
    """Set up the process before it joins the others; return the number of threads that torch, imported last, uses.

    With `one_queue` CUDA kernels start in one queue: a collective before the product next to it (tensor parallelism).
    """
    export_ranks(ranks)
    quiet_libraries()
    if (kept := keep_freed_memory()) is not None:
        logger.info("memory: %s", kept)
    use_own_build_folder()
    clear_stale_build_locks()
    if ranks.launcher in ("deepspeed", "torchrun", "ranks"):
        first_of_deepspeed = ranks.launcher == "deepspeed" and ranks.local_rank == 0
        die_with_launcher(watch_grandparent=first_of_deepspeed)
        if first_of_deepspeed:
            take_terminal()
    if ranks.launcher == "srun" and ranks.world_size > ranks.local_world_size:
        choose_gloo_interface((*read_task(os.environ).hosts, ranks.master_addr), os.environ)
    threads = threads_per_rank(available_cores(), ranks.local_world_size, os.environ)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # gloo keeps a socket to every rank
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if one_queue:
        # Read when CUDA starts (Megatron-LM asks for it too).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    torch.set_num_threads(threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return threads


def threads_per_rank(cores: int, local_world_size: int, environ: Mapping[str, str]) -> int:
    """Count the threads for one rank: its share of the node's cores.

    OMP_NUM_THREADS counts if a person or DeepSpeed's --bind_cores_to_rank set it; the 1 that torchrun sets does not.
    A task that srun bound to SLURM_CPUS_PER_TASK cores does not share them.
    """
    wanted = environ.get("OMP_NUM_THREADS", "")
    set_by_torchrun = wanted == "1" and "TORCHELASTIC_RUN_ID" in environ and local_world_size > 1
    if wanted.isdigit() and int(wanted) > 0 and not set_by_torchrun:
        return int(wanted)
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdigit() and cores <= int(per_task):
        return cores
    return max(1, cores // max(1, local_world_size))


class StopSignal:
    """A request to stop: SIGTERM (a launcher, Slurm), SIGUSR1 (Slurm ahead of the limit) or Ctrl-C.

    Training ends at the next micro-batch and saves. A second Ctrl-C ends the process immediately, and so does the first
    one while the process is still `starting`: there is nothing to save. Install it before torch is imported: until then
    SIGUSR1 ends the process.
    """

    def __init__(self) -> None:
        self.requested = False
        self.starting = False
        self.name: str | None = None
        """Name of the signal that came first, such as SIGTERM; None if none came."""
        self.step: int | None = None
        """Step that a stop at this moment saves, 0 if no step is done; None if that is not known."""
        self.make_room: Callable[[], bool] = lambda: True
        """Called before the line about the stop is written; False leaves it to the caller of `announce`."""
        self._interrupts = 0

    @property
    def number(self) -> int:
        """The signal's number; 0 if none came."""
        return int(signal.Signals[self.name or "SIGTERM"]) if self.requested else 0

    def install(self) -> StopSignal:
        """Handle the signals from now on (main thread only)."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # torchrun passes on a second Ctrl-C as SIGTERM.
        hurry = number == signal.SIGTERM and self.name == "SIGINT" and "TORCHELASTIC_RUN_ID" in os.environ
        if number == signal.SIGINT or hurry:
            interrupted.set()
            self._interrupts += 1
            if self._interrupts > 1 or self.starting:
                self.name = "SIGINT"
                raise KeyboardInterrupt
        if self.requested:
            return
        self.requested = True
        self.name = signal.Signals(number).name
        if os.environ.get("RANK", "0") == "0" and self.make_room():
            self.announce()

    def announce(self) -> None:
        """Write the line about the stop."""
        # The terminal's cursor may be behind the ^C; a job's log has the time of each line.
        begin = "\n" if os.isatty(2) else time.strftime("%H:%M:%S ") if in_job() else ""
        say(self._announcement(), begin)

    def _announcement(self) -> str:
        """Return the line that a signal is answered with."""
        what = "saving a checkpoint" if self.step is None else f"saving step {self.step}"
        what = "no step is done, nothing to save" if self.step == 0 else what
        what = "before the first step" if self.starting else what
        if self.name == "SIGINT" and not in_job():
            return f"stopping: {what}; Ctrl-C again ends it immediately"
        return f"{self.name}: stopping: {what}"


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    remedy = "start with deepspeed, torchrun or srun, or unset RANK and WORLD_SIZE to run one process"
    return read_number(environ, name, default, remedy)


def free_port() -> int:
    """Return a port of this machine that nothing uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
    """Return the interface that has an IPv4 address."""
    import psutil

    found = psutil.net_if_addrs().items()
    return next((name for name, entries in found if any(entry.address == address for entry in entries)), None)


def _address_towards(host: str) -> str:
    """Return the address from which this machine would speak to a host; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
            unused.connect((host, _ANY_PORT))
            return str(unused.getsockname()[0])
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return not address or address.startswith("127.") or address == "::1"

"""Which rank this process is, under any launcher, and what a process must set up before torch is imported."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Any

from ctxlm_ds.console import logger
from ctxlm_ds.process.cgroups import available_cores, read_text
from ctxlm_ds.process.run_lock import this_process
from ctxlm_ds.registry import LAUNCHERS

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
LARGEST_KEPT_BYTES = 2**30
NEVER_TRIM_BYTES = 2**31 - 1
"""The largest value that mallopt takes."""
RELEASE_S = 0.5  # torch closes the file a moment before it removes it
COMPILERS_S = 900.0  # how long to wait for the compilers of a killed process
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The machine's first namespace, a constant of Linux (PROC_PID_INIT_INO)."""
REMOTE_STALE_S = 900.0
"""Processes of other hosts that share the storage cannot be seen; no build takes this long."""
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse", "9p", "afs", "pvfs", "wekafs")
# Known noise of libraries by its exact text; everything else stays visible. DeepSpeed calls the old names.
KNOWN_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"`torch\.distributed\.all_gather_into_tensor` is deprecated", FutureWarning),
    (r"`torch\.distributed\.reduce_scatter_tensor` is deprecated", FutureWarning),
    # DeepSpeed's pipeline broadcasts activations in groups of two and returns their gradients itself.
    (r"c10d::broadcast_: an autograd kernel was not registered", UserWarning),
)
KNOWN_LOG_LINES = (
    "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.",
    # Of Muon, LAMB and other optimizers that tests/dist runs under every ZeRO stage.
    "**** You are using ZeRO with an untested optimizer",
)
KNOWN_PRINTS = (
    # PipelineModule's table and PipelineParallelGrid's topology.
    "SEED_LAYERS=",
    "Using topology:",
)


@dataclass(frozen=True)
class RankInfo:
    """One process among those of a run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str
    """Name of the entry of LAUNCHERS that started it."""
    device_index: int
    """Accelerator of this rank among those it sees: its local rank, or 0 if each task sees a single one."""


class Launcher:
    """What starts and stops the ranks of a run, and the variables that it sets; base of the entries of LAUNCHERS."""

    default_threads = ""
    """OMP_NUM_THREADS of several ranks if nobody asks for a number of threads; empty: not set."""
    second_interrupts: tuple[int, ...] = (signal.SIGINT,)
    """Signals by which it passes on a second Ctrl-C."""
    returns_status = False
    """True if it ends with the status of a stopped rank; others would take it for a failure."""

    def has_started(self, environ: Mapping[str, str]) -> bool:
        """Return whether it started the process with these variables."""
        raise NotImplementedError

    def place(self, environ: Mapping[str, str]) -> RankInfo:
        """Return the process's place, with any name. Raises ConfigError for missing or wrong variables."""
        raise NotImplementedError

    def prepare(self, ranks: RankInfo) -> None:
        """Tie this rank to the launcher, before torch is imported."""

    def finish(self, ranks: RankInfo, was_interrupted: bool) -> None:
        """Run when this rank is about to end."""


def discover_ranks(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Find this process's place from a launcher's variables; without any it is alone.

    Launchers of other packages are asked first. Raises ConfigError for missing, wrong or contradicting variables.
    """
    environ = os.environ if environ is None else environ
    names = sorted(LAUNCHERS.names(), key=LAUNCHERS.shipped_names().__contains__)
    name = next(name for name in names if LAUNCHERS.get(name).has_started(environ))
    return replace(LAUNCHERS.get(name).place(environ), launcher=name)


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
    keep_freed_memory()
    clear_stale_build_locks()
    launcher = LAUNCHERS.get(ranks.launcher)
    launcher.prepare(ranks)
    threads = threads_per_rank(available_cores(), ranks.local_world_size, os.environ, launcher.default_threads)
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

    from ctxlm_ds.process.patches import import_dynamo_late

    import_dynamo_late()
    torch.set_num_threads(threads)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return threads


def threads_per_rank(cores: int, local_world_size: int, environ: Mapping[str, str], default: str = "") -> int:
    """Count the threads for one rank: its share of the node's cores.

    OMP_NUM_THREADS counts if a person or DeepSpeed's --bind_cores_to_rank set it; the launcher's own `default` for
    several ranks does not. A task that srun bound to SLURM_CPUS_PER_TASK cores does not share them.
    """
    wanted = environ.get("OMP_NUM_THREADS", "")
    set_by_launcher = wanted == default and local_world_size > 1
    if wanted.isdigit() and int(wanted) > 0 and not set_by_launcher:
        return int(wanted)
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdigit() and cores <= int(per_task):
        return cores
    return max(1, cores // max(1, local_world_size))


def free_port() -> int:
    """Return a port of this machine that nothing uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def keep_freed_memory(environ: Mapping[str, str] | None = None) -> bool:
    """Make glibc keep freed blocks of less than 1 GiB in the process; return whether it does.

    glibc returns a freed block of 32 MiB or more to the kernel (mallopt(3), M_MMAP_THRESHOLD). A gradient of a
    vocabulary table is larger, so every step would have its pages cleared and mapped again, one page fault per 4 KiB.
    Other C libraries are left as they are, and so is glibc if the environment has settings of its allocator.
    """
    environ = os.environ if environ is None else environ
    tuned = any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    if tuned or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Older versions refuse a threshold above 32 MiB; without the limit, no block is returned.
    kept = bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) or bool(mallopt(M_MMAP_MAX, 0))
    return kept and bool(mallopt(M_TRIM_THRESHOLD, NEVER_TRIM_BYTES))


def use_own_build_folder() -> Path:
    """Give this environment a build folder (one per host on shared storage), or keep TORCH_EXTENSIONS_DIR.

    torch.utils.cpp_extension keeps one folder per user, so that two environments in turn compile DeepSpeed's operators
    again at every start. Call it before torch is imported.
    """
    # This environment's ninja: another version would take the builds for outdated and repeat them.
    own, others = Path(sys.executable).parent, os.environ.get("PATH", "").split(os.pathsep)
    if others[:1] != [str(own)]:
        os.environ["PATH"] = os.pathsep.join([str(own), *others])
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ctxlm_ds"
        parts = [sys.prefix, sys.version, metadata.version("torch"), metadata.version("deepspeed")]
        if _is_network_path(cache):
            parts.append(socket.gethostname())
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
        os.environ["TORCH_EXTENSIONS_DIR"] = str(cache / "torch_extensions" / name)
    return Path(os.environ["TORCH_EXTENSIONS_DIR"])


def clear_stale_build_locks(root: Path | None = None) -> list[Path]:
    """Remove the build locks that no live process holds, below `root` or this environment's folder; return them.

    torch guards each build by a file `lock` that it removes afterwards. A process that is killed while it holds one
    leaves the file, and every later start would wait for it indefinitely. A lock is stale if no process has it open and
    none works in its folder: compilers may outlive the process that started them.
    """
    folder = root or use_own_build_folder()
    locks = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    suspects = _stale(locks, _paths_in_use()) if locks else []
    end_s, announced = time.monotonic() + COMPILERS_S, False
    while suspects:
        time.sleep(RELEASE_S)
        used = _paths_in_use()
        suspects = _stale(suspects, used)
        busy = [str(path.parent) for path in suspects if os.path.realpath(path.parent) in used]
        if not busy or time.monotonic() > end_s:
            break
        if not announced:
            logger.info("waiting for the compilers that a killed process left in %s", ", ".join(busy))
        announced = True
    for path in suspects:
        path.unlink(missing_ok=True)
        logger.info("removed the stale build lock %s of a killed process", path)
    return suspects


def _stale(locks: Sequence[Path], used: Container[str]) -> list[Path]:
    return [path for path in locks if os.path.realpath(path) not in used and path.exists() and _old_enough(path)]


def _paths_in_use() -> set[str]:
    """Return the open files and working directories of this machine's processes, as far as this user may see."""
    used = set()
    # Unlike Path.glob, glob passes over processes that end meanwhile.
    for link in [*glob("/proc/[0-9]*/cwd"), *glob("/proc/[0-9]*/fd/*")]:
        with contextlib.suppress(OSError):
            used.add(os.readlink(link))
    return used


def _old_enough(path: Path) -> bool:
    """Return whether a lock may be removed by its age.

    It must be old on shared storage, where it may be another host's, and in a container, which does not see its host's
    processes.
    """
    if this_process().pid_namespace == FIRST_PID_NAMESPACE and not _is_network_path(path):
        return True
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > REMOTE_STALE_S
    return False


def _is_network_path(path: Path) -> bool:
    """Return whether the path's mount is a network file system, by /proc/mounts."""
    target = os.path.realpath(path)
    best, kind = "", ""
    for line in read_text(Path("/proc/mounts")).splitlines():
        mount, mount_kind = line.split()[1:3]
        if len(mount) >= len(best) and (target == mount or target.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, mount_kind
    return kind.startswith(NETWORK_FILE_SYSTEMS)


def quiet_libraries() -> None:
    """Silence known noise of torch, DeepSpeed and tokenizers; call it before they are imported.

    Settings in the environment stay.
    """
    # c10d complains about a peer's host name without reverse lookup.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Loader workers fork after a tokenizer was used.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for message, category in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.setLevel(logging.WARNING)
    deepspeed.addFilter(lambda record: not record.getMessage().startswith(KNOWN_LOG_LINES))


@contextlib.contextmanager
def without_known_prints() -> Iterator[None]:
    """Drop what DeepSpeed prints (rather than logs) on every rank while it starts, by its known beginning."""
    from ctxlm_ds.process.patches import replaced

    shown = builtins.print

    def print_unknown(*values: Any, **settings: Any) -> None:
        if not str(next(iter(values), "")).startswith(KNOWN_PRINTS):
            shown(*values, **settings)

    with replaced(builtins, "print", print_unknown):
        yield

"""Runs functions on groups of gloo ranks that live on from case to case, one group for each world size.

A case is a function and its arguments, sent to every rank over a pipe. Before each case a rank joins a new process
group through a file of its own; after it the groups and what DeepSpeed and megatron-core keep in their modules go.
What a fresh rank pays once (imports made late, first collectives, memory copied from the parent) is so paid by the
first case only. A case that fails, hangs or loses a rank ends its group; the next case gets a new one.

Ranks are forked when a world size is first asked for. The parent must have no threads by then: cases compute in ranks,
also those on one rank.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from tests.dist.forks import RanksFailed, fork_ranks, prepare_to_fork

STATEFUL = (
    "deepspeed.comm.comm",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.runtime.pipe.p2p",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.groups",
    "megatron.core.parallel_state",
    "torch.nn.functional",
)
"""Modules whose variables remember the process groups and engines of a case (ZeRO stage 3 replaces `linear`)."""
GRACE_S = 5.0
"""How long the other ranks may take to say what a failure did to them."""


class Group:
    """Ranks that run one case after another."""

    def __init__(self, world_size: int) -> None:
        """Fork the ranks."""
        prepare_to_fork()
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.ranks: dict[int, tuple[int, Connection]] = {}
        for rank in range(world_size):
            ours, theirs = Pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                # A rank ends when nobody can send it a case any more: it must hold no end of the parent's.
                for connection in (ours, *(end for groups in _ALL for end in groups.ends())):
                    connection.close()
                _serve(rank, world_size, self.folder, theirs)
            theirs.close()
            self.ranks[rank] = (pid, ours)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank; the results by rank.

        Raises:
            RanksFailed: with every failed rank's traceback; the group is gone then.
        """
        order = pickle.dumps((fn, args, timeout_s))
        failures: dict[int, str] = {}
        results: dict[int, Any] = {}
        for rank, (_, connection) in self.ranks.items():
            try:
                connection.send_bytes(order)
            except OSError:
                failures[rank] = "was dead before the case"
        waiting = {connection: rank for rank, (_, connection) in self.ranks.items()}
        deadline_s = time.monotonic() + timeout_s
        while waiting:
            left_s = deadline_s - time.monotonic()
            ready = wait(list(waiting), timeout=max(0.0, min(left_s, GRACE_S) if failures else left_s))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    failures[rank] = f"died without a word: exit status {self._exit_status(rank)}"
                    continue
                (results if succeeded else failures)[rank] = value
        for rank in waiting.values():
            failures[rank] = f"still running after {timeout_s:g} s (or after another rank's failure); killed"
        if failures:
            self.close()
            raise RanksFailed("\n".join(f"--- rank {rank}:\n{text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        """Kill the ranks."""
        for rank, (pid, connection) in self.ranks.items():
            connection.close()
            if pid:
                os.kill(pid, signal.SIGKILL)
                self._exit_status(rank)
        self.ranks = {}
        shutil.rmtree(self.folder, ignore_errors=True)

    def _exit_status(self, rank: int) -> int | None:
        pid, connection = self.ranks[rank]
        if not pid:
            return None
        self.ranks[rank] = (0, connection)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Groups:
    """A group for each world size, forked when it is first asked for."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        _ALL.append(self)

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
        """Run a case as tests.dist.forks.fork_ranks does on ranks of its own (Group.run)."""
        group = self._groups.get(world_size)
        if group is None or not group.ranks:
            group = self._groups[world_size] = Group(world_size)
        return group.run(fn, *args, timeout_s=timeout_s)

    def ends(self) -> list[Connection]:
        """The parent's ends of all pipes."""
        return [connection for group in self._groups.values() for _, connection in group.ranks.values()]

    def close(self) -> None:
        """Kill all ranks."""
        for group in self._groups.values():
            group.close()


_ALL: list[Groups] = []


_SHARED = Groups()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on the ranks of a group that the tests of a file share (Groups.run).

    Local functions cannot be sent to ranks that live; they run on new ones.
    """
    try:
        pickle.dumps((fn, args))
    except (AttributeError, TypeError, pickle.PicklingError):
        return fork_ranks(fn, world_size, *args, timeout_s=timeout_s)
    return _SHARED.run(fn, world_size, *args, timeout_s=timeout_s)


def close_shared() -> None:
    """Kill the ranks that the tests of a file shared."""
    _SHARED.close()


@atexit.register
def _close_all() -> None:
    for groups in _ALL:
        groups.close()


def _serve(rank: int, world_size: int, folder: Path, orders: Connection) -> NoReturn:
    """Run cases until the parent is gone."""
    try:
        atexit.unregister(_close_all)
        for received in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(received, signal.SIG_DFL)
        torch.set_num_threads(1)
        # DeepSpeed collects often, which takes long over all that the parent left here.
        gc.freeze()
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
        )
        saved = {name: dict(vars(importlib.import_module(name))) for name in STATEFUL}
        for number in itertools.count():
            fn, args, timeout_s = pickle.loads(orders.recv_bytes())
            orders.send_bytes(_answer(fn, args, rank, world_size, folder / f"store-{number}", timeout_s, saved))
    except (EOFError, OSError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: Path,
    timeout_s: float,
    saved: Mapping[str, Mapping[str, Any]],
) -> bytes:
    """Run one case and let go of all that it made."""
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        result = pickle.dumps((True, fn(rank, world_size, *args)))
        _empty_engines()
        # Nobody may leave while another still talks to it through gloo.
        dist.barrier()
        dist.destroy_process_group()
        _put_back(saved)
        return result
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _empty_engines() -> None:
    """Let go of engines, which parameters and hooks on gradients hold in cycles that Python does not see."""
    for left in gc.get_objects():
        if issubclass(type(left), DeepSpeedEngine) and "optimizer" in vars(left):
            holders = [left.optimizer, left, *left.module.parameters(), *left.module.modules()]
            left.destroy()
            for holder in holders:
                vars(holder).clear()


def _put_back(saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the stateful modules the variables of before the first case, and free what the case left."""
    for name, variables in saved.items():
        module = sys.modules[name]
        for variable in vars(module).keys() - variables.keys():
            delattr(module, variable)
        for variable, value in variables.items():
            setattr(module, variable, value)
    gc.collect()

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
import contextlib
import gc
import importlib
import itertools
import os
import pickle
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.distributed import distributed_c10d

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from tests.dist.forks import Group, fork_ranks, join_group

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


class Groups:
    """A group for each world size, forked when it is first asked for."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._folders: list[Path] = []
        _ALL.append(self)

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
        """Run a case as tests.dist.forks.fork_ranks does on ranks of its own (Group.run)."""
        group = self._groups.get(world_size)
        if group is None or not group.ranks:
            # A rank ends when nobody can send it a case any more: it must hold no end of the parent's.
            ends = [end for groups in _ALL for end in groups.ends()]
            self._folders.append(Path(tempfile.mkdtemp(prefix="ranks-")))
            serve = partial(_serve, world_size, self._folders[-1])
            group = self._groups[world_size] = Group(world_size, serve, ends)
        order = pickle.dumps((fn, args, timeout_s))
        for _, connection in group.ranks.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(order)
        return group.collect(timeout_s)

    def ends(self) -> list[Connection]:
        """The parent's ends of all pipes."""
        return [connection for group in self._groups.values() for _, connection in group.ranks.values()]

    def close(self) -> None:
        """Kill all ranks."""
        for group in self._groups.values():
            group.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


_ALL: list[Groups] = []


SHARED = Groups()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on the ranks of a group that all tests of a worker share (Groups.run).

    Local functions cannot be sent to ranks that live; they run on new ones.
    """
    try:
        pickle.dumps((fn, args))
    except (AttributeError, TypeError, pickle.PicklingError):
        return fork_ranks(fn, world_size, *args, timeout_s=timeout_s)
    return SHARED.run(fn, world_size, *args, timeout_s=timeout_s)


@pytest.fixture(autouse=True, scope="module")
def ranks_of_this_file() -> Iterator[None]:
    """Give a file that imports this fixture new ranks, and none of them to another file."""
    SHARED.close()
    yield
    SHARED.close()


@atexit.register
def _close_all() -> None:
    for groups in _ALL:
        groups.close()


def _serve(world_size: int, folder: Path, rank: int, orders: Connection) -> None:
    """Run cases until the parent is gone."""
    atexit.unregister(_close_all)
    # DeepSpeed collects often, which takes long over all that the parent left here.
    gc.freeze()
    saved = {name: dict(vars(importlib.import_module(name))) for name in STATEFUL}
    for number in itertools.count():
        fn, args, timeout_s = pickle.loads(orders.recv_bytes())
        orders.send_bytes(_answer(fn, args, rank, world_size, folder / f"store-{number}", timeout_s, saved))


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
        join_group(store, rank, world_size, timeout_s)
        result = pickle.dumps((True, fn(rank, world_size, *args)))
        _empty_engines()
        left = list(distributed_c10d._world.pg_map)
        if dist.is_initialized():  # a command leaves its group itself
            # Nobody may leave while another still talks to it through gloo.
            dist.barrier()
            dist.destroy_process_group()
        _put_back(saved)
        # Each waits some 10 ms for gloo's thread, without Python's lock: together longer than many a case.
        threading.Thread(target=left.clear).start()
        return result
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _empty_engines() -> None:
    """Let go of engines, which parameters and hooks on gradients hold in cycles that Python does not see."""
    for left in gc.get_objects():
        if issubclass(type(left), DeepSpeedEngine) and "optimizer" in vars(left):
            holders = [left.optimizer, left, *left.module.parameters(), *left.module.modules()]
            if dist.is_initialized():
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
    # What is left are modules: the next collections need not look at them (0.1 s each).
    gc.freeze()

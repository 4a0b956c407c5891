"""Runs a function on newly forked gloo ranks, for tests that kill or change their ranks; others use runner.py.

Ranks are forked (0.2 s for 8 ranks; spawning takes half a minute) and meet through a file, so no port is needed and
tests can run side by side. Fork only before CUDA is touched.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

IMPORTED = (
    "ctxlm_ds.kernels.cpu_loops", "ctxlm_ds.models.parts.embeddings", "ctxlm_ds.models.parts.heads",
    "ctxlm_ds.models.parts.transformer", "ctxlm_ds.objectives.corruption.spans",
    "ctxlm_ds.objectives.corruption.tokens", "ctxlm_ds.training.engine.zero_optimizers",
    "ctxlm_ds.training.engine.pipeline", "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.engine", "deepspeed.runtime.superoffload.superoffload_stage3", "torch._dynamo",
)  # fmt: skip
GRACE_S = 5.0
"""How long the other ranks may take to say what a failure did to them."""


class RanksFailed(AssertionError):
    """One or more ranks raised, died or hung; the message holds each one's traceback or fate."""


def fork_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank of a gloo process group; the results by rank.

    The default process group is initialised (also for world_size 1) and RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE are set. Results must be picklable. Children never return into the caller.

    Raises:
        RanksFailed: with every failed rank's traceback; a rank still running after `timeout_s` is killed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:

        def answer(rank: int, connection: Connection) -> None:
            try:
                join_group(Path(folder) / "store", rank, world_size, timeout_s)
                message = pickle.dumps((True, fn(rank, world_size, *args)))
            except BaseException:
                connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
                return
            connection.send_bytes(message)
            # Nobody may leave while another still talks to it through gloo: the parent ends all.
            connection.recv_bytes()

        group = Group(world_size, answer)
        try:
            return group.collect(timeout_s)
        finally:
            group.close()


class Group:
    """Ranks that were forked together, each with a pipe to the parent."""

    def __init__(
        self, world_size: int, serve: Callable[[int, Connection], None], ends: Iterable[Connection] = ()
    ) -> None:
        """Fork ranks that call `serve(rank, pipe)` and end; they close `ends` of other pipes that they inherit."""
        prepare_to_fork()
        self.ranks: dict[int, tuple[int, Connection]] = {}
        for rank in range(world_size):
            ours, theirs = Pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                for connection in (ours, *ends):
                    connection.close()
                _be_rank(rank, world_size, serve, theirs)
            theirs.close()
            self.ranks[rank] = (pid, ours)

    def collect(self, timeout_s: float) -> list[Any]:
        """Every rank's next answer.

        Raises:
            RanksFailed: with every failed rank's traceback; the group is gone then.
        """
        deadline_s = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {connection: rank for rank, (_, connection) in self.ranks.items()}
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

    def _exit_status(self, rank: int) -> int | None:
        pid, connection = self.ranks[rank]
        if not pid:
            return None
        self.ranks[rank] = (0, connection)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@cache
def prepare_to_fork() -> None:
    """Import once what every rank would import (2 s each), and keep it out of the ranks' collections of garbage."""
    for name in IMPORTED:
        import_module(name)
    import_module("deepspeed.ops").__compatible_ops__  # noqa: B018 (runs a compiler the first time)
    # Numba loads most of itself, and its code of other runs, at the first call.
    x, key = torch.ones(4), torch.tensor(1)
    import_module("ctxlm_ds.kernels.dropout").loop_dropout(x, 0.1, key)
    import_module("cpuinfo").get_cpu_info()
    gc.collect()
    gc.freeze()


def join_group(store: Path, rank: int, world_size: int, timeout_s: float) -> None:
    """Make the default process group of a case."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    # Nobody may fail or leave while another is still connecting.
    dist.barrier()


def _be_rank(rank: int, world_size: int, serve: Callable[[int, Connection], None], connection: Connection) -> NoReturn:
    try:
        for received in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(received, signal.SIG_DFL)
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
        )
        serve(rank, connection)
    except (EOFError, OSError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

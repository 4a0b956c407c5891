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
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist


IMPORTED = (
    "ctxlm_ds.kernels.cpu_loops", "ctxlm_ds.objectives.corruption.spans", "ctxlm_ds.training.engine.bf16_optimizer",
    "ctxlm_ds.training.engine.pipeline", "deepspeed.ops.op_builder.all_ops", "deepspeed.runtime.engine",
)  # fmt: skip


class RanksFailed(AssertionError):
    """One or more ranks raised, died or hung; the message holds each one's traceback or fate."""


def fork_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank of a gloo process group; the results by rank.

    The default process group is initialised (also for world_size 1) and RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE are set. Results must be picklable. Children never return into the caller.

    Raises:
        RanksFailed: with every failed rank's traceback; a rank still running after `timeout_s` is killed.
    """
    prepare_to_fork()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = Path(folder) / "store"
        children: dict[int, tuple[int, Connection]] = {}
        for rank in range(world_size):
            receiver, sender = Pipe(duplex=False)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                receiver.close()
                _child(fn, rank, world_size, args, store, sender, timeout_s)
            sender.close()
            children[rank] = (pid, receiver)
        return _collect(children, timeout_s)


@cache
def prepare_to_fork() -> None:
    """Import once what every rank would import (2 s each), and keep it out of the ranks' collections of garbage."""
    for name in IMPORTED:
        import_module(name)
    import_module("deepspeed.ops").__compatible_ops__  # noqa: B018 (runs a compiler the first time)
    gc.collect()
    gc.freeze()


def _child(
    fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], store: Path, sender: Connection,
    timeout_s: float,
) -> NoReturn:
    status = 1
    try:
        for received in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(received, signal.SIG_DFL)
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
        )
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        # Nobody may fail or leave while another is still connecting.
        dist.barrier()
        result = pickle.dumps(fn(rank, world_size, *args))
        sender.send_bytes(b"+" + result)
        status = 0
        # Nobody may leave while another still talks to it through gloo.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        if status:
            sender.send_bytes(b"-" + traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _collect(children: dict[int, tuple[int, Connection]], timeout_s: float) -> list[Any]:
    deadline_s = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {connection: rank for rank, (_, connection) in children.items()}
    while waiting:
        left_s = deadline_s - time.monotonic()
        if failures:
            # The others usually fail too, of the lost connection; give them a moment to say so.
            left_s = min(left_s, 5.0)
        ready = wait(list(waiting), timeout=max(0.0, left_s))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                message = connection.recv_bytes()
            except EOFError:
                failures[rank] = ""
                continue
            if message[:1] == b"+":
                results[rank] = pickle.loads(message[1:])
            else:
                failures[rank] = message[1:].decode()
    for rank in waiting.values():
        failures[rank] = f"still running after {timeout_s:g} s (or after another rank's failure); killed"
        os.kill(children[rank][0], signal.SIGKILL)
    for rank, (pid, connection) in children.items():
        connection.close()
        exit_code = _reap(pid, deadline_s)
        if failures.get(rank) == "":
            failures[rank] = f"died without a word: exit status {exit_code}"
    if failures:
        raise RanksFailed("\n".join(f"--- rank {rank}:\n{text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(children))]


def _reap(pid: int, deadline_s: float) -> int:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)

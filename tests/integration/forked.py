"""A command in a fork of this process, which has imported what every run imports: a start takes 0.1 s instead of 7 s.

It has its own arguments, environment, output, session and exit status, as in a process of its own, and several ranks
meet as under a launcher that sets RANK and WORLD_SIZE. Tests of launchers, signals and imports start real processes.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import ctxlm_ds.registry
from tests.dist.forks import prepare_to_fork

ROUTE = (
    "ctxlm_ds.run", "ctxlm_ds.training.engine.runtime", "ctxlm_ds.pretrain", "ctxlm_ds.process.run_lock",
    "ctxlm_ds.apps.evaluate.during_run", "ctxlm_ds.training.hooks.status", "ctxlm_ds.apps.report.run_report",
    "transformers.models.bert.modeling_bert", "transformers.pipelines",
)  # fmt: skip
GRACE_S = 30.0
"""How long ranks may take to end after one has failed."""


@cache
def can_fork() -> bool:
    """Import what runs import; False if this process must not be forked."""
    import torch

    if torch.cuda.is_available() or torch.distributed.is_initialized():
        return False
    for name in ROUTE:
        import_module(name)
    prepare_to_fork()
    return True


class Forked:
    """A command in a fork, with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self, words: Sequence[str], environ: Mapping[str, str], folder: Path, output: int, errors: int, ranks: int
    ) -> None:
        self.args = words
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _lead(words, environ, folder, output, errors, ranks)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        end_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end_s:
                os.killpg(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def _lead(
    words: Sequence[str], environ: Mapping[str, str], folder: Path, output: int, errors: int, ranks: int
) -> NoReturn:
    """Run the command in a new session: here for one rank, else in a process for each rank."""
    status = 1
    try:
        os.setsid()
        if ranks == 1:
            _run(words, environ, folder, output, errors)
        pids = {}
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            pids[rank] = os.fork()
            if pids[rank] == 0:
                _run(words, {**environ, **place}, folder, output, errors)
        status = _wait(list(pids.values()))
    finally:
        os._exit(status)


def _wait(pids: list[int]) -> int:
    """Wait for every rank. After the first failure, send SIGTERM to the others and return its status."""
    failed, end_s = 0, float("inf")
    while pids:
        pid, raw = os.waitpid(-1, os.WNOHANG)
        if pid:
            pids.remove(pid)
            status = os.waitstatus_to_exitcode(raw)
            if status and not failed:
                failed, end_s = status if status > 0 else 128 - status, time.monotonic() + GRACE_S
                for other in pids:
                    os.kill(other, signal.SIGTERM)
        elif time.monotonic() > end_s:
            for other in pids:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.01)
    return failed


def _run(words: Sequence[str], environ: Mapping[str, str], folder: Path, output: int, errors: int) -> NoReturn:
    """Become a new process, as far as the command can see, and run it."""
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        _find_packages([str(folder), *environ.get("PYTHONPATH", "").split(os.pathsep)])
        for number, handle in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, errors)):
            os.dup2(handle, number)
        # A fork of a fork replaces such files, which must not close their descriptors then.
        opened = partial(open, closefd=False)
        sys.stdin, sys.stdout, sys.stderr = opened(0), opened(1, "w"), opened(2, "w", buffering=1)
        logging.root.handlers.clear()
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        status = _command(words)
        atexit._run_exitfuncs()
        multiprocessing.util._exit_function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _find_packages(folders: list[str]) -> None:
    """Find modules and installed entries also in folders that this process has not looked into."""
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    ctxlm_ds.registry.entry_points.cache_clear()
    for value in vars(ctxlm_ds.registry).values():
        if isinstance(value, ctxlm_ds.registry.Registry):
            vars(value).pop("_installed", None)


def _command(words: Sequence[str]) -> int:
    """Run `-m MODULE ...` or `tools/x.py ...`; return the exit status."""
    try:
        if words[:2] == ["-m", "ctxlm_ds.pretrain"]:
            from ctxlm_ds.pretrain import main

            sys.argv = ["pretrain.py", *words[2:]]
            main()
        elif words[0] == "-m":
            sys.argv = [*words[1:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*words]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0

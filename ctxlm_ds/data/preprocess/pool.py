"""Map a function over a stream in worker processes: results in order, a bounded number in flight."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any, TypeVar

from ctxlm_ds.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

# The function of this worker process; a pool can only hand it over through the module.
_worker_state: dict[str, Callable[[Any], Any]] = {}


def ordered_map(
    build: Callable[[], Callable[[Item], Result]], items: Iterable[Item], num_workers: int
) -> Iterator[Result]:
    """`build()(item)` for each item, in order; `build` runs once a worker process (must be picklable).

    One worker computes in this process. Raises DataError where a worker dies (the kernel's out-of-memory killer).
    """
    if num_workers <= 1:
        with _single_thread():
            function = build()
            for item in items:
                yield function(item)
        return
    executor = ProcessPoolExecutor(
        num_workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(build,)
    )
    pending: deque[Future[Any]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(_call_worker, item))
            if len(pending) > 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        _unblock(executor)
        raise DataError(
            "a worker process died (most often the machine ran out of memory); use fewer --workers"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _unblock(executor: ProcessPoolExecutor) -> None:
    """Let a broken pool end: Python before 3.11.5 waits for ever for items that no worker reads any more (gh-94777).

    Its later versions close this end of the pipe themselves.
    """
    queue = getattr(executor, "_call_queue", None)
    if sys.version_info < (3, 11, 5) and queue is not None:
        queue._reader.close()


@contextmanager
def _single_thread() -> Iterator[None]:
    """One worker is one core: the tokenizers library stays off the other ones."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _start_worker(build: Callable[[], Callable[[Any], Any]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tidies up; the workers end with it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_state["function"] = build()


def _exit_with_parent() -> None:
    """A parent killed by SIGKILL cannot tell its workers; they would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _call_worker(item: Any) -> Any:
    return _worker_state["function"](item)


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that what is unfinished is removed (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

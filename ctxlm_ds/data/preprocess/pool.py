"""Map a function over a stream in worker processes: results in order, with a bounded number in flight."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from ctxlm_ds.errors import DataError
from ctxlm_ds.process.launchers import die_with_launcher

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_WORKERS = 1024

# The function of this worker process; a pool can only hand it over through the module.
_worker_state: dict[str, Callable[[Any], Any]] = {}


def ordered_map(
    build: Callable[[], Callable[[Item], Result]], items: Iterable[Item], num_workers: int
) -> Generator[Result, None, None]:
    """Yield `build()(item)` for each item, in order; one worker computes in this process.

    `build`, which must be picklable, makes the function once per worker process. Raises DataError for too many workers,
    or if one died (the kernel's out-of-memory killer).
    """
    if num_workers > MAX_WORKERS:
        raise DataError(f"--workers {num_workers}: at most {MAX_WORKERS:,} are possible")
    if num_workers <= 1:
        with _single_thread():
            function = build()
            for item in items:
                yield function(item)
        return
    spawn, arguments = multiprocessing.get_context("spawn"), (build, os.getpid())
    executor = ProcessPoolExecutor(num_workers, mp_context=spawn, initializer=_start_worker, initargs=arguments)
    pending: deque[Future[Any]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(_call_worker, item))
            if len(pending) > 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        # Python before 3.11.5 waits indefinitely for items that no worker reads any more (gh-94777).
        if sys.version_info < (3, 11, 5) and executor._call_queue is not None:  # type: ignore[attr-defined]
            executor._call_queue._reader.close()  # type: ignore[attr-defined]
        raise DataError(
            "a worker process died (most often the machine ran out of memory); use fewer --workers"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _single_thread() -> Iterator[None]:
    """Keep the tokenizers library on one core."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        os.environ.update({} if before is None else {"TOKENIZERS_PARALLELISM": before})


def _start_worker(build: Callable[[], Callable[[Any], Any]], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent cleans up; the workers end with it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    die_with_launcher(watch_grandparent=False, parent=parent)
    _worker_state["function"] = build()


def _call_worker(item: Any) -> Any:
    return _worker_state["function"](item)

"""The pretraining program with one rank that misbehaves: `torchrun tests/integration/misbehaving.py HOW RANK STEP ...`.

What hangs, dies or fails here does so in a real run, at the beginning of one step; everything else is the program's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ctxlm_ds.pretrain import main


def sleep_in_python() -> None:
    time.sleep(100_000)


def hold_the_interpreter() -> None:
    """C code that does not let any other thread of this process run."""
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def stop() -> None:
    """Stand still, until the launcher's SIGTERM waits for this process; torchrun waits 30 s before it kills."""
    pid = os.getpid()
    if os.fork() == 0:
        for _ in range(1200):
            pending = Path(f"/proc/{pid}/status").read_text().partition("ShdPnd:")[2].split()[0]
            if int(pending, 16) >> (signal.SIGTERM - 1) & 1:
                os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.1)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def fail() -> None:
    raise ValueError("a bug of one rank")


HOW: dict[str, Callable[[], object]] = {
    "sleep": sleep_in_python,
    "hold": hold_the_interpreter,
    "stop": stop,
    "crash": partial(ctypes.string_at, 0),
    "fail": fail,
    "kill": partial(os.kill, os.getpid(), signal.SIGKILL),
}


def outlive(record: Path) -> None:
    """Go on in a child, and end as it ended once another rank has left its record.

    The child's connections close as it ends, but the launcher sees no end before the other rank has seen the loss.
    """
    if (child := os.fork()) == 0:
        return
    _, status = os.waitpid(child, 0)
    deadline_s = time.monotonic() + 60
    while not record.exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    os._exit(os.waitstatus_to_exitcode(status))


def misbehave(how: str, rank: int, step: int) -> None:
    """Change the engine's step in this process, once it is imported."""
    if int(os.environ.get("RANK", "0")) != rank:
        return
    from ctxlm_ds.training.engine.engine import Engine

    train_step = Engine.train_step

    def changed(self: Engine, batches: Any, index: int, *rest: Any) -> Any:
        if index == step:
            HOW[how]()
        return train_step(self, batches, index, *rest)

    Engine.train_step = changed  # type: ignore[method-assign]


if __name__ == "__main__":
    # DeepSpeed's launcher puts its own word first.
    how, rank, step, *words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    if how == "fail" and os.environ.get("RANK", "0") == rank:
        folder = next(word.removeprefix("run_dir=") for word in words if word.startswith("run_dir="))
        outlive(Path(folder) / "attempts" / os.environ["CTXLM_ATTEMPT"] / "rank-00000.json")
    import ctxlm_ds.run  # noqa: F401  (before the rank is known to it, so that nothing is imported twice)

    misbehave(how, int(rank), int(step))
    main(words)

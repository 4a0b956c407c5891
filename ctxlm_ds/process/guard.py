"""A small process next to each rank for what the rank itself cannot do: notice that none of its threads can run (C code
holds the interpreter, the process was stopped), record that it was killed, and end the compilers that it had started.

In: lines on stdin, each the seconds after which a silent rank counts as hanging; `bye` before an orderly end. Out: the
stacks and failure records of RUN/attempts/ATTEMPT. The rank starts it before torch is imported, as a program:
`python -m ctxlm_ds.process.guard FACTS`. Not here: the limits (watchdog.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from ctxlm_ds.atomic import write_text
from ctxlm_ds.errors import EXIT_HANG, EXIT_UNEXPECTED
from ctxlm_ds.process.launcher import end_deepspeed_command, end_processes_with
from ctxlm_ds.process.run_history import FailureRecord, write_record
from ctxlm_ds.process.stacks import (
    ALL_STACKS_NAME,
    MAIN_THREAD,
    NO_ANSWER,
    name_threads,
    read_scratch,
    stacks_name,
    write_joined,
)

POLL_S = 0.5
ANSWER_S = 1.0
KILL_AFTER_S = 45.0
"""Between reporting a hung rank and killing it: meanwhile the others collect the stacks and end."""
KILL_ALONE_AFTER_S = 5.0
"""The same for a single rank."""
DUMP_SIGNAL = signal.SIGUSR2
FATAL = "Fatal Python error"
GOODBYE = "bye"
MARK_VARIABLE = "CTXLM_RANK_MARK"
"""Inherited by every program that the rank starts, by which the guard finds them when the rank is dead."""


@dataclass(frozen=True)
class GuardFacts:
    """What the guard must know of its rank."""

    folder: str
    """Evidence of this start."""
    rank: int
    world_size: int
    pid: int
    main_thread: int
    scratch: int
    """Open file that faulthandler writes to on DUMP_SIGNAL and in a crash."""
    mark: str = ""
    """Value of MARK_VARIABLE."""
    deepspeed_command: int = 0
    """Process of the local `deepspeed` command if this guard must silence it at Ctrl-C, else 0."""


class GuardProcess:
    """The guard as its rank sees it; every method is safe if the guard has ended."""

    def __init__(self, facts: GuardFacts) -> None:
        environ = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
        words = [sys.executable, "-m", "ctxlm_ds.process.guard", json.dumps(asdict(facts))]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(facts.scratch,), env=environ
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    def allow(self, seconds: float) -> None:
        """Let the rank be silent for so long from now on."""
        self._send(f"{seconds:.3f}")

    def leave(self) -> None:
        """Announce an end that the rank reports itself."""
        self._send(GOODBYE)

    def dismiss(self) -> None:
        """Leave, and wait until the guard has ended."""
        self.leave()
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self._process.communicate(timeout=5)

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pipe, f"{line}\n".encode())


def mark_children() -> str:
    """Set MARK_VARIABLE for every program that this process starts from now on, and return its value."""
    mark = os.environ[MARK_VARIABLE] = uuid.uuid4().hex
    return mark


class Guard:
    """The loop of the guard's own process."""

    def __init__(self, facts: GuardFacts) -> None:
        self._facts = facts
        self._folder = Path(facts.folder)
        self._left_s = math.inf
        self._reported: Path | None = None
        self._given_up = False
        self._unread = b""
        self._open = True

    def run(self) -> None:
        """Watch until the rank has ended."""
        watched = [handle for handle in (0, _process_handle(self._facts.pid)) if handle is not None]
        while True:
            begin_s = time.monotonic()
            ready = select.select(watched if self._open else watched[1:], [], [], POLL_S)[0]
            if 0 in ready and self._listen():
                return
            if os.getppid() != self._facts.pid:
                if not (self._open and self._listen()):
                    self._record_death()
                return
            # If the guard was stopped too (a suspended job or machine), the time does not count.
            self._left_s -= min(time.monotonic() - begin_s, 3 * POLL_S)
            if self._left_s <= 0 and self._judge():
                return

    def _listen(self) -> bool:
        """Read what the rank sent; return whether it said goodbye."""
        data = os.read(0, 1 << 16)
        self._open = bool(data)
        *lines, self._unread = (self._unread + data).split(b"\n")
        if GOODBYE.encode() in lines:
            return True
        if lines:
            self._left_s = float(lines[-1])
            self._withdraw_report()
        return False

    def _withdraw_report(self) -> None:
        """Remove the stacks of a rank that runs again: it had been stopped."""
        if self._reported is not None:
            with contextlib.suppress(OSError):
                self._reported.unlink()
            self._reported = None

    def _judge(self) -> bool:
        """Keep the stacks of a rank that is silent for too long, then kill it; return whether it is dead."""
        state = _state(self._facts.pid)
        if self._reported is None:
            self._reported = self._folder / stacks_name(self._facts.rank)
            # In a thread, because the run directory may be what hangs.
            threading.Thread(target=self._write_stacks, args=(state,), daemon=True).start()
        # A stopped process may be continued, unless the others have waited for it in vain.
        patience_s = KILL_AFTER_S if self._facts.world_size > 1 else KILL_ALONE_AFTER_S
        too_late = self._left_s <= -patience_s and not state.startswith("T")
        if not (too_late or self._given_up):
            return False
        os.kill(self._facts.pid, signal.SIGKILL)
        message = (
            "silent for too long, none of its threads could run (C code held the interpreter?); killed by its guard"
        )
        self._say(f"{message}; its stacks are in {self._reported}")
        self._record("Hang", message, EXIT_HANG, None)
        with contextlib.suppress(OSError):
            if not (self._folder / ALL_STACKS_NAME).exists():
                write_joined(self._folder, self._facts.world_size)
        return True

    def _write_stacks(self, state: str) -> None:
        begin = os.fstat(self._facts.scratch).st_size
        with contextlib.suppress(OSError):
            os.kill(self._facts.pid, DUMP_SIGNAL)
        time.sleep(ANSWER_S)
        text = name_threads(read_scratch(self._facts.scratch, begin), {self._facts.main_thread: MAIN_THREAD})
        head = (
            f"rank {self._facts.rank} of {self._facts.world_size} on {socket.gethostname()} (process "
            f"{self._facts.pid}, state {state}): {NO_ANSWER}"
        )
        own = self._folder / stacks_name(self._facts.rank)
        with contextlib.suppress(OSError):
            if self._reported == own:
                write_text(own, f"{head}\n\n{text}")
        while self._reported == own and not self._given_up:
            time.sleep(POLL_S)
            # The others have joined their stacks with this one's and ended.
            self._given_up = (self._folder / ALL_STACKS_NAME).exists()

    def _record_death(self) -> None:
        """Record a rank that died without reporting it, and end the programs that it had started."""
        end_processes_with(MARK_VARIABLE, self._facts.mark)
        text, message = None, "killed from outside (out of memory? kill -9?), or ended by C code"
        _, found, crash = read_scratch(self._facts.scratch).rpartition(FATAL)
        if found:
            text = name_threads(FATAL + crash, {self._facts.main_thread: MAIN_THREAD}).rstrip()
            message = text.partition("\n")[0]
        self._say(text or message)
        self._record("Killed", message, EXIT_UNEXPECTED, text)

    def _say(self, text: str) -> None:
        tag = f"[rank {self._facts.rank}] " if self._facts.world_size > 1 else ""
        with contextlib.suppress(OSError):
            os.write(2, "".join(f"{tag}{line}\n" for line in text.splitlines()).encode())

    def _record(self, error: str, message: str, status: int, traceback: str | None) -> None:
        # RUN/attempts/ATTEMPT: a start that failed early must not make a run directory.
        if self._folder.parent.parent.is_dir():
            host, rank = socket.gethostname(), self._facts.rank
            record = FailureRecord(round(time.time(), 3), rank, host, status, error, message, traceback)
            write_record(self._folder, record)


def _process_handle(pid: int) -> int | None:
    """Open a handle that becomes readable when the process ends; None if the kernel has none (its parent is polled)."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _state(pid: int) -> str:
    """Read a process's state, such as `T (stopped)`."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")


def main() -> None:
    """Entry point of the guard's process."""
    facts = GuardFacts(**json.loads(sys.argv[1]))
    # Signals that a launcher or Slurm sends to all processes of a rank.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: end_deepspeed_command(facts.deepspeed_command))
    Guard(facts).run()


if __name__ == "__main__":
    main()

"""A small process beside each rank for what the rank itself cannot do: notice that it stands still although none of its
threads can run (C code holds the interpreter, the process was stopped), and tell of its death when it was killed.

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
from dataclasses import asdict, dataclass
from pathlib import Path

from ctxlm_ds.atomic import write_text
from ctxlm_ds.errors import EXIT_HANG, EXIT_UNEXPECTED
from ctxlm_ds.process.run_history import FailureRecord, write_record
from ctxlm_ds.process.stacks import ALL_STACKS_NAME, MAIN_THREAD, name_threads, read_scratch, stacks_name, write_joined

POLL_S = 0.5
ANSWER_S = 1.0
KILL_AFTER_S = 45.0
"""Between taking a rank to hang and killing it: the others collect the stacks meanwhile and end."""
KILL_ALONE_AFTER_S = 5.0
"""The same where there are no others."""
DUMP_SIGNAL = signal.SIGUSR2
FATAL = "Fatal Python error"
GOODBYE = "bye"


@dataclass(frozen=True)
class GuardFacts:
    """What the guard must know of its rank."""

    folder: str
    """Of this start's evidence."""
    rank: int
    world_size: int
    pid: int
    main_thread: int
    scratch: int
    """Open file that faulthandler writes to on DUMP_SIGNAL and in a crash."""


class GuardProcess:
    """The guard as its rank sees it; every method is safe where the guard is gone."""

    def __init__(self, facts: GuardFacts) -> None:
        words = [sys.executable, "-m", "ctxlm_ds.process.guard", json.dumps(asdict(facts))]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(facts.scratch,)
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    def allow(self, seconds: float) -> None:
        """Let the rank be silent for so long from now on."""
        self._tell(f"{seconds:.3f}")

    def leave(self) -> None:
        """The rank tells of its end by itself."""
        self._tell(GOODBYE)

    def dismiss(self) -> None:
        """Leave, and wait until the guard is gone."""
        self.leave()
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self._process.communicate(timeout=5)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pipe, f"{line}\n".encode())


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
            said_goodbye = self._listen() if 0 in ready else False
            if said_goodbye:
                return
            if os.getppid() != self._facts.pid:
                if not (self._open and self._listen()):
                    self._tell_of_death()
                return
            # Where the guard was stopped too (a suspended job or machine), the time does not count.
            self._left_s -= min(time.monotonic() - begin_s, 3 * POLL_S)
            if self._left_s <= 0 and self._judge():
                return

    def _listen(self) -> bool:
        """Read what the rank said; True where that was goodbye."""
        data = os.read(0, 1 << 16)
        self._open = bool(data)
        *lines, self._unread = (self._unread + data).split(b"\n")
        if GOODBYE.encode() in lines:
            return True
        if lines:
            self._left_s = float(lines[-1])
            self._take_back()
        return False

    def _take_back(self) -> None:
        """The rank lives: it had been stopped."""
        if self._reported is not None:
            with contextlib.suppress(OSError):
                self._reported.unlink()
            self._reported = None

    def _judge(self) -> bool:
        """The rank is silent for too long: keep its stacks, then kill it. True where it is dead."""
        state = _state(self._facts.pid)
        if self._reported is None:
            self._reported = self._folder / stacks_name(self._facts.rank)
            # Aside, because the run directory may be what hangs.
            threading.Thread(target=self._write_stacks, args=(state,), daemon=True).start()
        # Whoever stopped it may continue it, unless the others have waited for it in vain.
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
            f"{self._facts.pid}, state {state}): none of its threads answers"
        )
        own = self._folder / stacks_name(self._facts.rank)
        with contextlib.suppress(OSError):
            if self._reported == own:
                write_text(own, f"{head}\n\n{text}")
        while self._reported == own and not self._given_up:
            time.sleep(POLL_S)
            # The others have joined their stacks with this one's and ended.
            self._given_up = (self._folder / ALL_STACKS_NAME).exists()

    def _tell_of_death(self) -> None:
        """The rank is gone without a word."""
        crash = read_scratch(self._facts.scratch).rpartition(FATAL)
        if crash[1]:
            text = name_threads(FATAL + crash[2], {self._facts.main_thread: MAIN_THREAD}).rstrip()
            message = text.partition("\n")[0]
            shown = text
        else:
            text = None
            message = shown = "killed from outside (out of memory? kill -9?), or ended by C code"
        self._say(shown)
        self._record("Killed", message, EXIT_UNEXPECTED, text)

    def _say(self, text: str) -> None:
        tag = f"[rank {self._facts.rank}] " if self._facts.world_size > 1 else ""
        with contextlib.suppress(OSError):
            os.write(2, "".join(f"{tag}{line}\n" for line in text.splitlines()).encode())

    def _record(self, error: str, message: str, status: int, traceback: str | None) -> None:
        facts = self._facts
        # RUN/attempts/ATTEMPT: a start that came to nothing must not make a run directory.
        if self._folder.parent.parent.is_dir():
            host = socket.gethostname()
            record = FailureRecord(round(time.time(), 3), facts.rank, host, status, error, message, traceback)
            write_record(self._folder, record)


def _process_handle(pid: int) -> int | None:
    """Becomes readable when the process ends; None where the kernel lacks it (its parent is polled then)."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _state(pid: int) -> str:
    """`T (stopped)` and the like."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "unknown"


def main() -> None:
    """Entry point of the guard's process."""
    # Those that a launcher or Slurm sends to all processes of a rank.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Guard(GuardFacts(**json.loads(sys.argv[1]))).run()


if __name__ == "__main__":
    main()

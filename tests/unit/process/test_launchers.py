"""Which processes above DeepSpeed's per-node launcher its ranks are tied to; real processes that bear their names."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ctxlm_ds.process.launchers import launcher_ties, parent_of

SSHD = "sshd: user@notty"
NEWER_SSHD = "sshd-session: user@notty"
COMMAND = "/venv/bin/python /venv/bin/deepspeed --hostfile hosts"
SHELL = "sh -c cd /work; python -u -m deepspeed.launcher.launch --world_info=x"
LOGIN = "-bash"


@contextmanager
def chain(*names: str) -> Iterator[list[int]]:
    """Processes with these command lines, each the parent of the next; the last has a child of its own."""
    script = "sleep 60 & echo $$ $!; wait"
    for name in reversed(names):
        script = f'echo $$; bash -c \'exec -a "$0" bash -c "$1"\' {_quoted(name)} {_quoted(script)} & wait'
    top = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert top.stdout is not None
        pids = [int(word) for _ in range(len(names) + 1) for word in top.stdout.readline().split()]
        # The first is the top itself; every process tells its own number, and the last that of its child.
        yield list(dict.fromkeys(pids[1:]))
    finally:
        os.killpg(top.pid, signal.SIGKILL)
        top.wait()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@pytest.mark.parametrize(
    ("names", "num_ties"),
    [
        ([COMMAND], 1),
        ([SSHD], 1),
        ([NEWER_SSHD], 1),
        ([SSHD, SHELL], 2),
        ([SSHD, COMMAND], 1),
        ([SSHD, LOGIN, COMMAND], 1),
        ([LOGIN], 0),
    ],
)
def test_ties(names: list[str], num_ties: int) -> None:
    with chain(*names) as pids:
        launcher = pids[-1]
        ties = launcher_ties(launcher)
        assert len(ties) == num_ties
        assert all(parent_of(child) == above for child, above in ties)
        assert ties[:1] == [(launcher, pids[-2])][:num_ties]
        if num_ties:
            os.kill(ties[-1][1], signal.SIGKILL)
            deadline_s = time.monotonic() + 90
            while parent_of(ties[-1][0]) == ties[-1][1]:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)

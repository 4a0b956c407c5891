"""The readable log, from output of srun as it was recorded on a cluster."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.rank_output import LogFilter

KILLED_RANK = """\
0: 00:45:09 saved /runs/C/checkpoints/step-00000040 in 0.2 s
1: [rank 1] killed from outside (out of memory? kill -9?), or ended by C code
0: 00:45:09 tiny: an error
0: [rank 0] lost the others: RuntimeError: Connection closed by peer [10.213.77.12]:16598
srun: error: n2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=13.0
0: slurmstepd-n1: error: *** STEP 13.0 ON n1 CANCELLED AT 2026-11-22T00:45:09 ***
srun: error: n1: task 0: Exited with exit code 1
srun: Force Terminated StepId=13.0
"""


def filtered(tmp_path: Path, text: str) -> tuple[list[str], LogFilter]:
    shown: list[str] = []
    with LogFilter(tmp_path / "output.log", shown.append) as lines:
        for line in text.splitlines():
            lines.line(line)
    return shown, lines


def test_rank_0_and_slurm_are_shown_and_deaths_are_held(tmp_path: Path) -> None:
    shown, lines = filtered(tmp_path, KILLED_RANK)
    assert shown == [
        "00:45:09 saved /runs/C/checkpoints/step-00000040 in 0.2 s",
        "00:45:09 tiny: an error",
        "srun: error: n2: task 1: Killed",
        "slurmstepd-n1: error: *** STEP 13.0 ON n1 CANCELLED AT 2026-11-22T00:45:09 ***",
        "srun: error: n1: task 0: Exited with exit code 1",
    ]
    assert set(lines.held) == {0, 1} and lines.held[1][0].startswith("killed from outside")
    assert (tmp_path / "output.log").read_text() == KILLED_RANK


def test_other_ranks_show_warnings_once(tmp_path: Path) -> None:
    text = "".join(f"{rank:4d}: 10:00:0{rank} [rank {rank}] disk of n{rank} is slow\n" for rank in range(1, 6))
    text += "   3: some library's chatter\n   3: 10:00:09 [rank 3] something else\n"
    shown, _ = filtered(tmp_path, text)
    assert shown == [
        "10:00:01 [rank 1] disk of n1 is slow", "10:00:09 [rank 3] something else",
    ]  # fmt: skip


def test_a_plain_traceback_of_rank_0_is_held(tmp_path: Path) -> None:
    text = """\
0: before
0: Traceback (most recent call last):
0:   File "a.py", line 1, in <module>
0:     1/0
0: ZeroDivisionError: division by zero
0: 
0: During handling of the above exception, another exception occurred:
0: 
0: Traceback (most recent call last):
0:   File "a.py", line 3, in <module>
0: ValueError: no
0: after
"""
    shown, lines = filtered(tmp_path, text)
    assert shown == ["before", "after"]
    assert lines.held[0] == [line[3:] for line in text.splitlines()[1:-1]]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without room."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-n", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        (folder / "filler").write_bytes(b"x" * 4096)
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_loses_the_raw_output_only(full_disk: Path) -> None:
    shown: list[str] = []
    with LogFilter(full_disk / "output.log", shown.append) as lines:
        lines.line("0: one")
        lines.line("0: two")
    assert shown[-2:] == ["one", "two"]
    assert sum(os.strerror(errno.ENOSPC) in line for line in shown) == 1

"""The readable log, from output of srun as it was recorded on a cluster.

Which rank failed first, from what srun said and what ranks left.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.rank_start import LogFilter, gather_failures, report
from ctxlm_ds.process.failure import NODE, FailureRecord, write_record
from tests.real_disks import memory_disk

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
    lines = LogFilter(shown.append)
    lines.read(tmp_path / "output.log", text.splitlines(keepends=True))
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
0: 10:00:00 after
"""
    shown, lines = filtered(tmp_path, text)
    assert shown == ["before", "10:00:00 after"]
    assert lines.held[0] == [line[3:] for line in text.splitlines()[1:-1]]


def test_a_full_disk_loses_the_raw_output_only(tmp_path: Path) -> None:
    with memory_disk(tmp_path / "disk", "4k") as disk:
        disk.fill()
        shown, _ = filtered(disk.folder, "0: one\n0: two\n")
    assert shown[-2:] == ["one", "two"]
    assert sum(os.strerror(errno.ENOSPC) in line for line in shown) == 1


def record(folder: Path, rank: int, time_unix_s: float, **values: object) -> None:
    """What a rank leaves."""
    settings: dict[str, object] = {
        "host": f"n{rank + 1}", "exit_status": 1, "error": "ValueError", "message": "broken", "traceback": "T",
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    write_record(folder, FailureRecord(time_unix_s, rank, **{**settings, **values}))  # type: ignore[arg-type]


def lost(folder: Path, rank: int, time_unix_s: float) -> None:
    """What a rank leaves whose peer has gone."""
    text = f"Connection closed by peer [10.0.0.{rank}]:{time_unix_s}"
    record(folder, rank, time_unix_s, error="RuntimeError", message=text, consequence=True)


@pytest.mark.parametrize(
    ("is_lost", "failed", "lines", "order", "told"),
    [
        # A cause comes before earlier consequences.
        (True, {2: 3.0, 1: 2.0}, [], [1, 2, 0], "rank 1 on n2: ValueError: broken"),
        # A killed rank comes first, and those that Slurm has ended last.
        (True, {1: 1.5},
         ["srun: error: n4: task 3: Killed", "srun: launch/slurm: _step_signal: Terminating StepId=13.1",
          "srun: error: n5: tasks 4-5: Killed"],
         [3, 1, 0, 4, 5], "rank 3 on n4 was killed by signal 9 (Killed)"),
        # NCCL's watchdog aborts a process whose peer is gone.
        (False, {1: 1.0}, ["srun: error: n1: task 0: Aborted (core dumped)"], [1, 0],
         "rank 1 on n2: ValueError: broken"),
        # A node that fails comes before the ranks that lose it.
        (True, {1: 2.0}, ["srun: error: Node failure on n3", "srun: error: n1: task 0: Terminated"], [NODE, 1, 0],
         "node n3 failed"),
    ],
)  # fmt: skip
def test_the_cause_comes_first(
    tmp_path: Path, is_lost: bool, failed: dict[int, float], lines: list[str], order: list[int], told: str
) -> None:
    if is_lost:
        lost(tmp_path, 0, 1.0)
    for rank, time_unix_s in failed.items():
        record(tmp_path, rank, time_unix_s)
    failures = gather_failures(tmp_path, lines, {})
    assert [failure.rank for failure in failures] == order and failures[0].describe() == told


def test_a_crash_in_c_code_shows_its_stack(tmp_path: Path) -> None:
    held = {1: ["Fatal Python error: Segmentation fault", "", '  File "a.py", line 1 in crash']}
    failures = gather_failures(tmp_path, ["srun: error: n2: task 1: Segmentation fault (core dumped)"], held)
    assert failures[0].describe() == "rank 1 on n2 was killed by signal 11 (Segmentation fault)"
    assert report(failures, tmp_path)[-3:] == held[1]


def test_without_a_record_the_rank_s_own_words_are_taken(tmp_path: Path) -> None:
    held = {1: ["Traceback (most recent call last):", "  File a", "ValueError: no room"]}
    failures = gather_failures(tmp_path, ["srun: error: n2: task 1: Exited with exit code 1"], held)
    assert failures[0].exit_status == 1 and failures[0].message == "ValueError: no room"
    assert report(failures, tmp_path)[-3:] == held[1]


def test_the_report_ends_with_the_first_traceback_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    record(tmp_path, 7, 0.5, traceback="Traceback\n  frame\nValueError: broken\n")
    for rank in range(200):
        if rank != 7:
            lost(tmp_path, rank, 1.0 + rank)
    lines = report(gather_failures(tmp_path, [], {}), tmp_path)
    assert len(lines) < 10 and "198 more" in lines[1], lines
    assert lines[-4:] == ["first failing rank: rank 7 on n8: ValueError: broken", "Traceback", "  frame",
                          "ValueError: broken"]  # fmt: skip


def test_the_last_line_without_a_traceback(tmp_path: Path) -> None:
    """Nothing is known; a connection was lost; a user's mistake."""
    assert report([], tmp_path) == [f"output of all ranks: {tmp_path / 'output.log'}"]
    lost(tmp_path, 0, 1.0)
    assert "Connection closed" in report(gather_failures(tmp_path, [], {}), tmp_path)[-1]
    record(tmp_path, 0, 1.0, exit_status=2, error="DataError", message="a.bin is missing;\ncopy it", traceback=None)
    assert report(gather_failures(tmp_path, [], {}), tmp_path)[-1] == "error: a.bin is missing;\ncopy it"

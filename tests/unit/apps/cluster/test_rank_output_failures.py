"""Which rank failed first, from what srun said and what ranks left."""

from __future__ import annotations

from pathlib import Path

from ctxlm_ds.apps.cluster.rank_output import gather_failures, report
from ctxlm_ds.process.failure import FailureRecord, write_record

ENDED = "srun: launch/slurm: _step_signal: Terminating StepId=13.1"


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


def test_a_cause_comes_before_earlier_consequences(tmp_path: Path) -> None:
    lost(tmp_path, 0, 1.0)
    record(tmp_path, 2, 3.0)
    record(tmp_path, 1, 2.0)
    assert [failure.rank for failure in gather_failures(tmp_path, [], {})] == [1, 2, 0]


def test_a_killed_rank_comes_first_and_those_that_slurm_ended_last(tmp_path: Path) -> None:
    lost(tmp_path, 0, 1.0)
    record(tmp_path, 1, 1.5)
    lines = ["srun: error: n4: task 3: Killed", ENDED, "srun: error: n5: tasks 4-5: Killed"]
    failures = gather_failures(tmp_path, lines, {})
    assert [failure.rank for failure in failures] == [3, 1, 0, 4, 5]
    assert failures[0].describe() == "rank 3 on n4 was killed by signal 9 (Killed)"


def test_an_abort_may_follow_from_a_peer(tmp_path: Path) -> None:
    """NCCL's watchdog aborts a process whose peer is gone."""
    record(tmp_path, 1, 1.0)
    failures = gather_failures(tmp_path, ["srun: error: n1: task 0: Aborted (core dumped)"], {})
    assert [failure.rank for failure in failures] == [1, 0]


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


def test_a_users_error_is_the_last_line(tmp_path: Path) -> None:
    record(tmp_path, 0, 1.0, exit_status=2, error="DataError", message="a.bin is missing;\ncopy it", traceback=None)
    assert report(gather_failures(tmp_path, [], {}), tmp_path)[-1] == "error: a.bin is missing;\ncopy it"


def test_nothing_known_still_says_where_to_look(tmp_path: Path) -> None:
    assert report([], tmp_path) == [f"output of all ranks: {tmp_path / 'output.log'}"]


def test_a_node_that_fails_comes_before_the_ranks_that_lose_it(tmp_path: Path) -> None:
    lost(tmp_path, 0, 1.0)
    record(tmp_path, 1, 2.0)
    lines = ["srun: error: Node failure on n3", "srun: error: n1: task 0: Terminated"]
    failures = gather_failures(tmp_path, lines, {})
    assert [failure.rank for failure in failures] == [None, 1, 0]
    assert report(failures, tmp_path)[-1] == "node n3 failed"


def test_a_lost_connection_alone_shows_no_traceback(tmp_path: Path) -> None:
    lost(tmp_path, 0, 1.0)
    assert "Connection closed" in report(gather_failures(tmp_path, [], {}), tmp_path)[-1]

"""The events of a run and the records of its ends: damaged ones are passed over, earlier ones cleared."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ctxlm_ds.process.run_history import (
    END,
    START,
    FailureRecord,
    append_event,
    clear_evidence,
    is_completed,
    read_failures,
    write_record,
)


def test_damaged_records_are_passed_over(tmp_path: Path) -> None:
    write_record(tmp_path, FailureRecord(2.0, 1, "n1", 1, "E", "m"))
    for rank, text in enumerate(["", "[]", "{}", '{"time_unix_s": "x", "rank": 0}'], 2):
        (tmp_path / f"rank-{rank:05d}.json").write_text(text)
    newer = {**json.loads((tmp_path / "rank-00001.json").read_text()), "of a later version": 1, "rank": 9}
    (tmp_path / "rank-00009.json").write_text(json.dumps(newer))
    assert [record.rank for record in read_failures(tmp_path)] == [1, 9]
    assert read_failures(tmp_path / "nowhere") == []


def test_evidence_of_earlier_starts_is_cleared(tmp_path: Path) -> None:
    names = ["rank-00000.json", "stacks-00000.txt", "stacks.txt", "asked-stacks-00000.txt", "output.log"]
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000, 1000))
    (tmp_path / "rank-00001.json").touch()
    clear_evidence(tmp_path, time.time() - 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output.log", "rank-00001.json"]


def test_a_run_is_completed_when_its_last_start_was(tmp_path: Path) -> None:
    assert not is_completed(tmp_path)
    append_event(tmp_path, START, step=0)
    append_event(tmp_path, END, step=5, completed=False)
    assert not is_completed(tmp_path)
    append_event(tmp_path, START, step=5)
    append_event(tmp_path, END, step=9, completed=True)
    assert is_completed(tmp_path)
    append_event(tmp_path, START, step=9)
    assert not is_completed(tmp_path)

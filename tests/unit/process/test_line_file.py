"""Lines on a real disk that fills up: none is torn, and all are there once there is room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.process.line_file import LineFile, read_lines
from tests.real_disks import memory_disk


def test_a_full_disk_tears_no_line_and_loses_none(tmp_path: Path) -> None:
    with memory_disk(tmp_path / "disk", "128k") as disk:
        path = disk.folder / "lines"
        file = LineFile(path)
        lines = [f"{step:04d} " + "x" * 700 for step in range(40)]
        for step, line in enumerate(lines[:3]):
            file.append(step, line)
        disk.fill()
        # The file's last page still takes a part of what comes.
        for step, line in enumerate(lines[3:30], start=3):
            file.append(step, line)
        written = path.read_text().splitlines()
        assert 3 <= len(written) < 30 and written == lines[: len(written)]
        disk.empty()
        for step, line in enumerate(lines[30:], start=30):
            file.append(step, line)
        assert path.read_text().splitlines() == lines


def test_lines_of_a_course_that_is_left_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines"
    file = LineFile(path)
    for step in (1, 2, 3):
        file.append(step, f"line {step}")
    path.parent.mkdir()
    file.forget_after(1)
    file.append(2, "line 2 again")
    assert path.read_text().splitlines() == ["line 1", "line 2 again"]


def test_closing_writes_what_waits_or_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "folder" / "lines"
    file = LineFile(path)
    for step in (1, 2):
        file.append(step, f"line {step}")
    file.close()
    assert "lacks its last 2 lines" in caplog.text
    path.parent.mkdir()
    caplog.clear()
    file.close()
    assert path.read_text().splitlines() == ["line 1", "line 2"] and not caplog.text


def test_some_lines_of_long_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(read_lines(path)) == []
    lines = [json.dumps({"step": 1000 + step, "loss": 1.5}) for step in range(500)]
    lines[251:251] = [json.dumps({"step": 1250, "eval/dev/loss": 1.0}), "[1]", '{"loss": 1.0}', "[" * 2_000]
    path.write_text("\n".join([*lines, '{"step": 15']))
    found = list(read_lines(path, most=50))
    assert 40 <= len(found) <= 65 and {"step": 1250, "eval/dev/loss": 1.0} in found
    assert len(list(read_lines(path))) == 501 and list(read_lines(path, 0)) == [{"step": 1250, "eval/dev/loss": 1.0}]

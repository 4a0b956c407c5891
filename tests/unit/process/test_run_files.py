"""The file has earlier lines too, appends over starts, and costs a run nothing if it cannot be written."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxlm_ds.console import setup_logging
from ctxlm_ds.process import run_files
from ctxlm_ds.process.run_files import NAME, LineFile, OutputLog, read_lines, say
from tests.real_disks import memory_disk

logger = logging.getLogger("ctxlm_ds")


@pytest.fixture(autouse=True)
def no_file() -> Iterator[None]:
    yield
    if run_files._descriptor is not None:
        os.close(run_files._descriptor)
        run_files._descriptor = None


def start(run_dir: Path, *lines: str) -> None:
    """A start that logs, gets the run directory, and logs and says something."""
    setup_logging()
    log = OutputLog()
    logger.info("early %s", lines[0])
    log.open(run_dir)
    logger.info("late %s", lines[0])
    say("stopping: saving step 3", begin="\n")


def test_two_starts_are_in_one_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number in ("1", "2"):
        start(tmp_path, number)
    lines = (tmp_path / NAME).read_text().splitlines()
    assert [line[20:] for line in lines if line[:2] == "20"] == ["early 1", "late 1", "early 2", "late 2"]
    assert [line for line in lines if line[:2] != "20"] == ["stopping: saving step 3"] * 2
    assert capfd.readouterr().err.count("\n\nstopping: saving step 3\n") == 2


def test_a_start_without_a_run_directory_leaves_no_file(tmp_path: Path) -> None:
    setup_logging()
    OutputLog()
    logger.info("early")
    say("Traceback")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / NAME).mkdir()
    start(tmp_path, "1")
    shown = capfd.readouterr().err
    assert "cannot be written, the run continues" in shown and "late 1" in shown and "Traceback" not in shown


def test_a_full_disk_costs_lines_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / NAME).symlink_to("/dev/full")
    start(tmp_path, "1")
    shown = capfd.readouterr().err
    assert "late 1" in shown and "stopping: saving step 3" in shown and "Traceback" not in shown


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
    path.write_text("\n".join([*lines, '{"step": 1500}', ""]))
    assert [*read_lines(path, most=50)] == [*found, {"step": 1500}]
    assert len(list(read_lines(path))) == 502 and list(read_lines(path, 0)) == [{"step": 1250, "eval/dev/loss": 1.0}]

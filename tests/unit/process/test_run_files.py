"""The file has earlier lines too, appends over starts, and costs a run nothing if it cannot be written."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxlm_ds.console import setup_logging
from ctxlm_ds.process import run_files
from ctxlm_ds.process.run_files import NAME, OutputLog, say

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

"""Numbers on a command line, as argparse itself takes or refuses them, and the progress of a job."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from ctxlm_ds import console
from ctxlm_ds.console import aligned, at_least, byte_progress, run_command
from ctxlm_ds.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "complaint"), [("-1", "-1 is too small; give 1 or more"), ("0", "0 is too small"), ("x", "'x' is not a")]
)
def test_numbers_that_cannot_be_are_refused(given: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=at_least(1))
    assert parser.parse_args(["--workers", "2"]).workers == 2
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--workers", given])
    assert stop.value.code == 2
    assert f"argument --workers: {complaint}" in capsys.readouterr().err


def test_progress_of_unknown_size_logs_the_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(console, "PLAIN_INTERVAL_S", 0.0)
    with caplog.at_level("INFO", logger="ctxlm_ds"), byte_progress("read", 0) as progress:
        progress.update(0, "3 documents")
    assert caplog.messages == ["read: 3 documents"]


@pytest.mark.parametrize("limits", [(24, 24), (40, 40)])
def test_too_few_open_files_are_one_error(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    with pytest.raises(SystemExit, match="2"):
        run_command(lambda: pytest.fail("nothing may begin"))


def test_a_limit_on_open_files_is_raised_as_far_as_a_command_needs() -> None:
    code = (
        "import resource; from ctxlm_ds.console import run_command; resource.setrlimit(7, (40, 500)); "
        "run_command(lambda: print(resource.getrlimit(7)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(256, 500)\n"


def test_an_error_is_one_message_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: Exception) -> None:
        raise error

    hostile = ConfigError("a\x1b]0;x\x07b\n\u2028c")
    for error, shown in [(MemoryError(), "not enough memory"), (hostile, "a ]0;x b\n c\n")]:
        with pytest.raises(SystemExit, match="2"):
            run_command(lambda error=error: fail(error))  # type: ignore[misc]
        assert shown in capsys.readouterr().err


STATUS = [
    ("run", "state", "step", "tokens/s", "checkpoint", "skipped", "log"),
    ("runs/a-study-of-the-optimizer/lamb-1e-3", "running", "12,900/500,000", "1,234,567", "12,500, 0:12 ago",
     "3, 1 back", "the job waits for its turn"),
    ("runs/b", "stopped", "7/500,000", "-", "-", "0", ""),
]  # fmt: skip


def test_a_table_fits_a_terminal_of_100_columns_and_keeps_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = aligned(STATUS, (0, 1, 6))
    assert len(whole) == 3 and max(map(len, whole)) > 100, "in a file"
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = aligned(STATUS, (0, 1, 6))
    assert len(lines) > 3 and max(map(len, lines)) <= 91, "also after the time of a log"
    words = " ".join(lines).split()
    for figure in ("12,900/500,000", "1,234,567", "12,500,", "0:12", "3,", "7/500,000"):
        assert figure in words
    assert "".join(sorted("".join(words))) == "".join(sorted("".join(" ".join(whole).split()))), "nothing is lost"
    assert [line[:3] for line in aligned([("log", "/" + 100 * "x"), ("a", "b")], (0, 1), "")] == ["log", "a  "]

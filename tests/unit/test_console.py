"""Numbers on a command line, as argparse itself takes or refuses them, and the progress of a job."""

from __future__ import annotations

import argparse
import os
import signal

import pytest

from ctxlm_ds import console
from ctxlm_ds.console import at_least, byte_progress, run_command


def test_sigterm_ends_a_command_like_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        run_command(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted; nothing incomplete was kept\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        run_command(lambda: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)


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

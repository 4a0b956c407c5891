"""Numbers on a command line, as argparse itself takes or refuses them, and the progress of a job."""

from __future__ import annotations

import argparse

import pytest

from ctxlm_ds import console
from ctxlm_ds.console import at_least, byte_progress


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

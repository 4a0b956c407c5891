"""Numbers on a command line, as argparse itself takes or refuses them."""

from __future__ import annotations

import argparse

import pytest

from ctxlm_ds.console import at_least


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

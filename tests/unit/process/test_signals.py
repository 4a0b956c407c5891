"""Signals that ask a run to stop, and the line that answers them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from ctxlm_ds.process.signals import STOP_SIGNALS, StopSignal


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield StopSignal().install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_asks_to_stop(stop: StopSignal, number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    assert not stop.requested
    os.kill(os.getpid(), number)
    assert stop.requested and stop.name == number.name
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.name == number.name
    said = capfd.readouterr().err
    begin = "" if number == signal.SIGINT else f"{number.name}: "
    again = "; Ctrl-C again ends it immediately" if number == signal.SIGINT else ""
    assert said == f"{begin}stopping: the last complete step is saved{again}\n"


@pytest.mark.parametrize(
    ("number", "starting"), [(signal.SIGUSR1, False), (signal.SIGINT, False), (signal.SIGTERM, True)]
)
def test_a_job_s_log_has_the_time_and_no_terminal(
    stop: StopSignal, number: signal.Signals, starting: bool, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("CTXLM_ATTEMPT", "job-7-0-0")
    stop.starting = starting
    os.kill(os.getpid(), number)
    what = "before the first step" if starting else "the last complete step is saved"
    assert re.fullmatch(rf"\d\d:\d\d:\d\d {number.name}: stopping: {what}\n", capfd.readouterr().err)


def test_a_second_interrupt_stops_at_once(stop: StopSignal) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

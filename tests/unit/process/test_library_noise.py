"""Known noise is dropped line by line; all else stays."""

from __future__ import annotations

import os

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ctxlm_ds.process.library_noise import without_profiler_marks


def test_torch_s_profiler_leaves_no_marks_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    recorded = profile(activities=[ProfilerActivity.CPU])
    with without_profiler_marks():
        recorded.start()
    torch.ones(3).sum()
    with without_profiler_marks():
        recorded.stop()
    assert "USDT" not in capfd.readouterr().err


def test_other_lines_on_standard_error_stay(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="inside"), without_profiler_marks():
        os.write(2, b"a warning\nUSDT:a mark\nanother USDT: in the middle\n")
        raise ValueError("inside")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "a warning\nanother USDT: in the middle\nafter\n"

"""The check of a recipe for a planned run (its lines: test_check_lines.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.plan.check_run import check_only, parse_arguments


@pytest.mark.parametrize("zero", [{"stage": "auto"}, None, "auto"])
def test_a_check_reads_the_stage_as_the_run_does(
    zero: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": zero}))
    monkeypatch.setattr("ctxlm_ds.apps.plan.check_run.model_lines", lambda *_: [])
    words = ["--config", "bert-tiny", "--check", "--deepspeed_config", str(tmp_path / "mine.json")]
    check_only(parse_arguments([*words, "--set", "training.precision=fp32"]))
    assert "ZeRO stage 0" in capsys.readouterr().out

"""The data tools on thousands of damaged datasets and inputs: success, or one error and status 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_tools_on_damaged_datasets_and_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "tests.tool_mutations", str(tmp_path), "0", "4000"]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-5000:]}"
    figures = json.loads(done.stdout)
    with capsys.disabled():
        print(figures)
    outcomes = figures["outcomes"]
    assert sum(outcomes.values()) == 4000
    assert figures["most_bytes"] < 2 << 30
    for outcome in ("dataset: [0]", "dataset: [2]", "dataset: [0, 0]", "dataset: [2, 2]", "input: 0", "input: 2"):
        assert outcomes[outcome] > 40, outcomes

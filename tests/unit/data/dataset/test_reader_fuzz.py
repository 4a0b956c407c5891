"""Thousands of damaged .bin, .idx, .json and .sha256 files: a DataError or a right result, whatever the damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def _outcomes(folder: Path, seed: int, count: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.indexed_mutations", str(folder), str(seed), str(count)]
    # Arenas of threads would take address space in proportion to the cores.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-3000:]}"
    outcomes: dict[str, int] = json.loads(done.stdout)
    return outcomes


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "count"), [(0, 2000), pytest.param(1, 30_000, marks=pytest.mark.soak)])
def test_damaged_files(tmp_path: Path, seed: int, count: int) -> None:
    outcomes = _outcomes(tmp_path, seed, count)
    assert sum(outcomes.values()) == count + -(-count // 8)
    # Every stage has its share; else the mutations no longer reach it.
    for outcome in ("refused when opened", "refused by --verify", "right", "not joined", "joined"):
        assert outcomes[outcome] > count // 1000
    assert outcomes["refused when its fingerprint was taken"]

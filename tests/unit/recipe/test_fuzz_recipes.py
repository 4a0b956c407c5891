"""Mutated recipes and DeepSpeed files are accepted or refused: no traceback, no hang, no growing memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def check(kind: str, seeds: range, folder: Path) -> dict[str, Any]:
    """Check mutated files in a process limited to 2 GB of memory."""
    words = [kind, str(seeds.start), str(seeds.stop), str(folder)]
    command = [sys.executable, "-m", "tests.unit.recipe.mutations", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"{kind}: {found['accepted']} accepted, {found['refused']} refused, peak {found['peak_megabytes']} MB")
    assert found["failures"] == []
    assert found["accepted"] + found["refused"] == len(seeds)
    return found


def accepted_by_deepspeed(folder: Path) -> int:
    """Give every accepted configuration to DeepSpeed's own parser; return their number."""
    import deepspeed

    lines = (folder / "accepted.jsonl").read_text().splitlines()
    for line in lines:
        settings = json.loads(line)
        # Without a process group DeepSpeed takes the world to be one rank.
        settings["gradient_accumulation_steps"] = settings["train_batch_size"] // 8
        try:
            deepspeed.DeepSpeedConfig(settings)
        except Exception as error:
            pytest.fail(f"DeepSpeed refuses {line}: {error}")
    return len(lines)


@pytest.mark.parametrize("kind", ["recipe", "deepspeed"])
def test_a_hundred_mutated_files_end_without_a_traceback(kind: str, tmp_path: Path) -> None:
    found = check(kind, range(100), tmp_path)
    assert min(found["accepted"], found["refused"]) > 5
    if kind == "deepspeed":
        assert accepted_by_deepspeed(tmp_path) == found["accepted"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_thousand_mutated_recipes_end_without_a_traceback(tmp_path: Path) -> None:
    check("recipe", range(1000, 6000), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_three_thousand_mutated_deepspeed_files_end_without_a_traceback(tmp_path: Path) -> None:
    found = check("deepspeed", range(1000, 4000), tmp_path)
    assert accepted_by_deepspeed(tmp_path) == found["accepted"]

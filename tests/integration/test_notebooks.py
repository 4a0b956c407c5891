"""docs/notebooks: their cells run in order, the second notebook on the run of the first; no output is committed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {path.stem: path for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}


def cells(name: str) -> list[dict[str, Any]]:
    return list(json.loads(NOTEBOOKS[name].read_text(encoding="utf-8"))["cells"])


def run(name: str, folder: Path) -> str:
    """Run the cells of code as one script, without Jupyter; what they print."""
    script = folder / f"{name}.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    command = [sys.executable, script.name]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_no_output(name: str) -> None:
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_notebooks_run(tmp_path: Path) -> None:
    assert set(NOTEBOOKS) == {"pretrain", "look"}
    trained = run("pretrain", tmp_path).splitlines()
    held_out = [float(line.split()[2]) for line in trained if line.split()[:1] in (["50"], ["200"])]
    assert held_out[1] < held_out[0] - 0.2, trained
    filled = [line for line in trained if line.startswith(("Return the [MASK]", "This function [MASK]"))]
    assert len(filled) == 2 and all(line.count("('") == 5 for line in filled), trained
    seen = run("look", tmp_path)
    assert "'eval/heldout/loss': (200," in seen and "[CLS]" in seen and "[MASK]" in seen
    assert [line.split()[0] for line in seen.splitlines()[-3:]] == ["list", "string", "returns"]

"""docs/notebooks: their cells run in order, the others on the run of pretrain.ipynb; no output is committed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.route import ROOT, call, launcher

pytestmark = [pytest.mark.xdist_group("notebooks"), pytest.mark.timeout(900)]
NOTEBOOKS = {path.stem: path for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}


def cells(name: str) -> list[dict[str, Any]]:
    return list(json.loads(NOTEBOOKS[name].read_text(encoding="utf-8"))["cells"])


def run(name: str, folder: Path) -> str:
    """Run the cells of code as one script, without Jupyter; what they print."""
    script = folder / f"{name}.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"))
    words = *launcher("forked", 1)[:2], script.name
    return call(*words, folder=folder, timeout_s=800, PYTHONPATH=str(ROOT), MPLBACKEND="Agg").stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_no_output(name: str) -> None:
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which pretrain.ipynb ran, and what it printed."""
    folder = tmp_path_factory.mktemp("notebooks")
    return folder, run("pretrain", folder)


def test_pretraining_fills_masks(pretrained: tuple[Path, str]) -> None:
    trained = pretrained[1].splitlines()
    held_out = [float(line.split()[2]) for line in trained if line.split()[:1] in (["50"], ["200"])]
    assert held_out[1] < held_out[0] - 0.2, trained
    filled = [line for line in trained if line.startswith(("Return the [MASK]", "This function [MASK]"))]
    assert len(filled) == 2 and all(line.count("('") == 5 for line in filled), trained


def test_a_look_at_the_run(pretrained: tuple[Path, str]) -> None:
    seen = run("look", pretrained[0])
    assert "'eval/heldout/loss': (200," in seen and "[CLS]" in seen and "[MASK]" in seen
    assert [line.split()[0] for line in seen.splitlines()[-3:]] == ["list", "string", "returns"]


def test_vectors_of_words(pretrained: tuple[Path, str]) -> None:
    lines = run("words", pretrained[0]).splitlines()
    assert sum(line.startswith(("group 0: ", "group 1: ")) for line in lines) == 2
    assert (pretrained[0] / "runs" / "senses.png").stat().st_size > 10_000
    assert len([line for line in lines[-6:] if 0.5 < float(line.split()[-1]) <= 1]) == 6


def test_vectors_of_sentences(pretrained: tuple[Path, str]) -> None:
    printed = run("sentences", pretrained[0])
    losses = re.search(r"^loss (\S+) in the first epoch, (\S+) in the last$", printed, re.MULTILINE)
    scores = re.search(r"^average precision (\S+) before, (\S+) after", printed, re.MULTILINE)
    assert losses and float(losses[2]) < float(losses[1])
    assert scores and float(scores[2]) > 0.5
    assert (pretrained[0] / "runs" / "sentences.png").stat().st_size > 5_000

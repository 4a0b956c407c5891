"""docs/notebooks: their cells run in order, the others on the run of pretrain.ipynb; no output is committed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.route import ROOT, call, launcher

pytestmark = pytest.mark.timeout(900)
NOTEBOOKS = {path.stem: path for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
SMALLER = {
    "pretrain": {
        "training.max_steps=200": "training.max_steps=32", "step % 50": "step % 8",
        "max_rows=128": 'max_rows=64", "training.global_batch_size=16',
    },
    "words": {
        "epochs=3": "epochs=1", "if WORD in words][:200]": "if WORD in words][:60]", "train[:800]": "train[:200]",
        "held_out[:300]": "held_out[:60]",
    },
    "directions": {
        "training.max_steps=400": "training.max_steps=8", "step % 100": "step % 4",
        'gaps("train", 1500), gaps("heldout", 500)': 'gaps("train", 300), gaps("heldout", 100)',
    },
    "sentences": {"sentences[:1536]": "sentences[:320]"},
}  # fmt: skip
"""What every run of the tests makes less of, by notebook; `make soak` runs them as they are."""
COMMAND = 'subprocess.run([sys.executable, "-m", "ctxlm_ds.cli", *command.split()], check=True)'
IN_A_FORK = 'call("forked", 1, "-m", "ctxlm_ds.cli", *command.split(), folder=Path.cwd())'


def cells(name: str) -> list[dict[str, Any]]:
    return list(json.loads(NOTEBOOKS[name].read_text(encoding="utf-8"))["cells"])


class Folder(NamedTuple):
    """Where the notebooks run, and whether with less of everything."""

    path: Path
    is_small: bool

    def run(self, name: str) -> str:
        """Run the cells of code as one script, without Jupyter; what they print."""
        text = "\n\n".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code")
        for complete, less in SMALLER.get(name, {}).items() if self.is_small else ():
            assert text.count(complete) == 1, complete
            text = text.replace(complete, less)
        if self.is_small and COMMAND in text:
            begin = "from pathlib import Path\nfrom tests.integration.route import call\n"
            text = begin + text.replace(COMMAND, IN_A_FORK)
        (self.path / f"{name}.py").write_text(text)
        words = *launcher("forked", 1)[:2], f"{name}.py"
        return call(*words, folder=self.path, timeout_s=800, PYTHONPATH=str(ROOT), MPLBACKEND="Agg").stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_no_output(name: str) -> None:
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.fixture(scope="module", params=["small", pytest.param("complete", marks=pytest.mark.soak)])
def pretrained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, str]:
    """The folder in which pretrain.ipynb ran, and what it printed."""
    folder = Folder(tmp_path_factory.mktemp("notebooks"), request.param == "small")
    return folder, folder.run("pretrain")


def test_pretraining_fills_masks(pretrained: tuple[Folder, str]) -> None:
    trained = pretrained[1].splitlines()
    held_out = [float(words[2]) for line in trained if (words := line.split()) and words[0].isdigit()]
    assert len(held_out) == 4 and held_out[3] < held_out[0] - 0.2, trained
    filled = [line for line in trained if line.startswith(("Return the [MASK]", "This function [MASK]"))]
    assert len(filled) == 2 and all(line.count(", 0.") == 5 for line in filled), trained


def test_a_look_at_the_run(pretrained: tuple[Folder, str]) -> None:
    seen, steps = pretrained[0].run("look"), 32 if pretrained[0].is_small else 200
    assert f"'eval/heldout/loss': ({steps}," in seen and "[CLS]" in seen and "[MASK]" in seen
    assert [line.split()[0] for line in seen.splitlines()[-3:]] == ["list", "string", "returns"]


def test_vectors_of_words(pretrained: tuple[Folder, str]) -> None:
    lines = pretrained[0].run("words").splitlines()
    assert sum(line.startswith(("group 0: ", "group 1: ")) for line in lines) == 2
    assert (pretrained[0].path / "runs" / "senses.png").stat().st_size > 10_000
    assert len([line for line in lines[-6:] if 0.5 < float(line.split()[-1]) <= 1]) == 6


def test_masks_of_several_papers(pretrained: tuple[Folder, str]) -> None:
    """80, 10 and 10 %, within what some hundred places allow; spans make longer gaps than tokens."""
    printed = pretrained[0].run("masks")
    shares = re.search(r"^\{'\[MASK\]': (\S+), 'unchanged': (\S+), 'another token': (\S+)\}$", printed, re.MULTILINE)
    assert shares and [float(share) for share in shares.groups()] == pytest.approx([0.8, 0.1, 0.1], abs=0.05)
    found = dict(re.findall(r"^(\S.*): \d+% of the positions, gaps of (\S+) tokens", printed, re.MULTILINE))
    tokens, words, spans, many = (float(length) for length in found.values())
    assert tokens < words < spans and tokens < many
    assert (pretrained[0].path / "runs" / "masks.png").stat().st_size > 10_000


def test_minimal_pairs_by_hand_and_by_command(pretrained: tuple[Folder, str]) -> None:
    printed = pretrained[0].run("pairs")
    by_hand = re.search(r"^\{'agreement': (\S+), 'articles': (\S+), 'order': (\S+)\}$", printed, re.MULTILINE)
    assert by_hand and (pretrained[0].path / "runs" / "pairs.png").stat().st_size > 5_000
    judged = pretrained[0].path / "runs" / "judged" / "notebook" / "blimp" / "points" / "seed0" / "metrics.json"
    paradigms = json.loads(judged.read_text())["groups"]["paradigms"]
    assert [float(share) for share in by_hand.groups()] == [
        pytest.approx(paradigms[name]["accuracy"], abs=5e-4) for name in ("agreement", "articles", "order")
    ]
    assert paradigms["order"]["accuracy"] > 0.8


def test_two_directions_apart_or_together(pretrained: tuple[Folder, str]) -> None:
    """A direction of the biLM reads one side only, BERT both; vectors of both sides know more than of one."""
    printed = pretrained[0].run("directions")
    read = re.findall(r"^(\S.*): (\d+)% from the left, (\d+)% from the right$", printed, re.MULTILINE)
    assert [(name, int(left) == 100, int(right) == 100) for name, left, right in read] == [
        ("biLM, forward", True, False), ("biLM, backward", False, True), ("BERT", False, False)
    ]  # fmt: skip
    scores = dict(re.findall(r"^(biLM.*|BERT|most frequent word): (0\.\d+)$", printed, re.MULTILINE))
    assert len(scores) == 5 and (pretrained[0].path / "runs" / "directions.png").stat().st_size > 10_000
    joined, *sides = (float(scores[f"biLM, {name}"]) for name in ("joined", "from the left", "from the right"))
    assert pretrained[0].is_small or joined > max(sides) > float(scores["most frequent word"]) + 0.05


def test_vectors_of_sentences(pretrained: tuple[Folder, str]) -> None:
    printed = pretrained[0].run("sentences")
    losses = re.search(r"^loss (\S+) in the first epoch, (\S+) in the last$", printed, re.MULTILINE)
    scores = re.search(r"^average precision (\S+) before, (\S+) after", printed, re.MULTILINE)
    assert losses and float(losses[2]) < float(losses[1])
    assert scores and float(scores[2]) > 0.5
    assert (pretrained[0].path / "runs" / "sentences.png").stat().st_size > 5_000

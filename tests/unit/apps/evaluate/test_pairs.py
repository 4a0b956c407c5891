"""Files of minimal pairs are read or refused by line; a tie counts half."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.apps.evaluate import pairs as pairs_module
from ctxlm_ds.apps.evaluate.pairs import accuracies, mean_accuracy, outcomes_of, read_pairs, score_pairs
from ctxlm_ds.apps.evaluate.scorers import open_scorer
from ctxlm_ds.errors import DataError
from tests.unit.apps.evaluate.conftest import Export

ROWS = [
    {"sentence_good": "the river was best.", "sentence_bad": "the river best was.", "UID": "order",
     "linguistics_term": "s-selection"},
    {"sentence_good": "a mountain walked.", "sentence_bad": "a mountain reading.", "UID": "verb",
     "linguistics_term": "argument_structure"},
]  # fmt: skip


def write(path: Path, rows: list[object]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_pairs_are_read_with_their_paradigm_and_phenomenon(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.xz", [*ROWS])
    write(tmp_path / "b.jsonl", [{"sentence_good": "x", "sentence_bad": "y"}, "", ROWS[0]])
    write(tmp_path / "notes.txt", ["no pairs"])
    found = read_pairs(tmp_path)
    assert found[1][:4] == ("a mountain walked.", "a mountain reading.", "verb", "argument_structure")
    known = {"order": "argument_structure", "verb": "argument_structure", "b": "b"}
    assert [pair.paradigm for pair in found] == ["order", "verb", "b", "order"]
    assert [pair.phenomenon for pair in found] == [known[pair.paradigm] for pair in found]
    assert [Path(pair.origin).name for pair in found] == ["a.jsonl.xz:1", "a.jsonl.xz:2", "b.jsonl:1", "b.jsonl:3"]
    assert found[:2] == read_pairs(tmp_path / "a.jsonl.xz")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"sentence_good": "x"}, "sentence_bad is missing"),
        ({**ROWS[0], "sentence_good": 3}, "sentence_good is no text"),
        ({**ROWS[0], "sentence_bad": " "}, "sentence_bad is no text"), ('{"sentence_good": "x"', "no JSON"),
        ("3", "a line is a JSON object"), ({**ROWS[0], "sentence_bad": "\ud800"}, "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{message}"):
        read_pairs(write(tmp_path / "a.jsonl", [ROWS[0], row]))


def test_nothing_is_no_pairs(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl", write(tmp_path / "empty.jsonl", [""])):
        with pytest.raises(DataError, match="no minimal pairs"):
            read_pairs(path)


def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    content = write(tmp_path / "a.jsonl", ROWS).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="has a file twice"):
        read_pairs(tmp_path)


def test_ties_count_half() -> None:
    scores = np.array([[-1.0, -2.0], [-3.0, -2.0], [-50.0, -50.00004], [-50.0, -50.0001], [0.0, 0.0]])
    outcomes = outcomes_of(scores)
    assert outcomes.tolist() == [1.0, 0.0, 0.5, 1.0, 0.5]
    found = accuracies(outcomes, ["a", "a", "b", "a", "b"])
    assert found["a"].value == pytest.approx(2 / 3) and found["a"][1:] == (0.0, 3)
    assert found["b"] == (0.5, 1.0, 2) and found["b"].ties_right == 1.0
    mean = mean_accuracy(found.values())
    assert mean == (pytest.approx(7 / 12), 0.5, 5) and mean.ties_right == pytest.approx(5 / 6)


def test_pairs_are_scored_as_their_sentences(export: Export, tmp_path: Path) -> None:
    pairs, scorer = read_pairs(write(tmp_path / "a.jsonl", [*ROWS])), open_scorer(export("bert"))
    found = score_pairs(scorer, pairs)
    assert found.shape == (2, 2)
    for pair, scores in zip(pairs, found, strict=True):
        np.testing.assert_allclose(scores, [float(scorer.scores([text])[0]) for text in pair[:2]], rtol=1e-5)


@pytest.mark.parametrize(("asked", "cut"), [(5, "-1.2"), (4, ""), (1, "-7\n")])
def test_an_interrupted_call_goes_on_behind_the_last_block(
    asked: int, cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six sentences in blocks of two; a line that was not completely written is scored again."""
    monkeypatch.setattr(pairs_module, "BLOCK", 2)
    pairs, read = read_pairs(write(tmp_path / "a.jsonl", [*ROWS, ROWS[0]])), []

    def score_each(sentences: list[str]) -> Iterator[float]:
        for text in sentences:
            if len(read) == asked:
                raise KeyboardInterrupt
            read.append(text)
            yield -float(len(text)) / 3

    scorer, kept = SimpleNamespace(score_each=score_each), tmp_path / "kept"
    with pytest.raises(KeyboardInterrupt):
        score_pairs(scorer, pairs, kept)  # type: ignore[arg-type]
    with open(kept, "a") as file:
        file.write(cut)
    done, asked = len(kept.read_text().splitlines()) // 2 * 2 if cut.endswith("\n") else asked // 2 * 2, -1
    expected = [-len(text) / 3 for pair in pairs for text in pair[:2]]
    if cut.endswith("\n"):
        expected[1] = -7.0
    read.clear()
    assert score_pairs(scorer, pairs, kept).ravel().tolist() == expected  # type: ignore[arg-type]
    assert len(read) == 6 - done and len(kept.read_text().splitlines()) == 6


def test_the_example_of_the_page_runs(export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "minimal-pairs.md").read_text()
    lines = [line[4:] for line in page.splitlines() if line.startswith("    ")]
    write(tmp_path / "a.jsonl", [*ROWS])
    (tmp_path / "corpus.txt").write_text(2 * f"{ROWS[0]['sentence_good']} {ROWS[0]['sentence_bad']}\n")
    code = "\n".join(lines).replace("runs/bert/hf", str(export("bert"))).replace('"blimp"', repr(str(tmp_path)))
    names: dict[str, Any] = {}
    exec(compile(code.replace("corpus.txt", str(tmp_path / "corpus.txt")), "minimal-pairs.md", "exec"), names)
    assert names["known"][0].good == ROWS[0]["sentence_good"] and len(names["outcomes"]) == len(names["known"])
    assert capsys.readouterr().out.startswith("Accuracy(value=")

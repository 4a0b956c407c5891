"""A study from text to its report: its runs train, are measured and scored, and a repetition gives the same figures."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from ctxlm_ds.apps.study import probes, runs
from ctxlm_ds.apps.study.command import main
from ctxlm_ds.apps.study.runs import Work
from tests.integration.route import call, call_here, launcher
from tests.integration.test_pretrain_default import in_forks  # noqa: F401
from tests.text import write_corpus

STUDY = """
title: Share of masked tokens
recipe: bert-docstrings
claim: {text: more are better, source: nobody, order: [many, few]}
arms:
  few: {set: {objective: {mask_prob: 0.2}}}
  many: {set: {objective: {mask_prob: 0.4}}}
  tuned: {of: many, reading: fine-tuned}
  random: {of: many, reading: random}
  static: {of: many, reading: word2vec}
measures: [conll2003-pos]
rates: [1]
sizes:
  tiny:
    budget: {tokens: 1500}
    seeds: 1
    set:
      model: {hidden_size: 32, num_layers: 1, num_attention_heads: 2, intermediate_size: 64, vocab_size: 400}
      training: {global_batch_size: 8, micro_batch_size: 4}
      evaluation: {interval_steps: 2, max_rows: 32}
"""


@pytest.fixture
def begun(in_forks: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:  # noqa: F811
    """Names of the processes that a study starts; they are forks of this one."""
    names: list[str] = []

    def execute(work: Sequence[Work], parallel: int) -> None:
        for one in work:
            names.append(one.name)
            done = call(*launcher("forked", 1)[:2], *one.words[1:])
            one.log.parent.mkdir(parents=True, exist_ok=True)
            one.log.write_text(done.stdout + done.stderr)

    monkeypatch.setattr(runs, "execute", execute)
    monkeypatch.setattr(probes, "FEWEST_STEPS", 20)
    return names


def write_tags(folder: Path) -> None:
    folder.mkdir(parents=True)
    words = [("the", "DT"), ("house", "NN"), ("falls", "VB"), ("of", "IN"), ("old", "JJ")]
    for name, count in (("train", 40), ("dev", 10)):
        sentences = ("\n".join(f"{word} {tag}" for word, tag in words[at % 3 :]) for at in range(count))
        (folder / f"{name}.conll").write_text("\n\n".join(sentences) + "\n")


def table(output: Path) -> list[list[str]]:
    return list(csv.reader((output / "results.csv").open()))[:6]


def test_a_study_from_text_to_its_report(begun: list[str], tmp_path: Path) -> None:
    write_corpus(tmp_path / "mine.txt", num_documents=60, seed=3, format="text")
    write_tags(tmp_path / "data" / "conll2003")
    (tmp_path / "mine.yaml").write_text(STUDY)
    output = tmp_path / "out"
    words = [tmp_path / "mine.yaml", "--output", output, "--corpus", tmp_path / "mine.txt", "--data", tmp_path / "data"]
    first = call_here(main, "study", *words)
    assert first.returncode == 0, first.stdout + first.stderr
    assert begun == ["few/rate-1/seed-1", "many/rate-1/seed-1"] * 2  # trained, then scored
    rows = [row[:-1] for row in table(output)]
    assert [row[0] for row in rows] == ["arm", "few", "many", "tuned", "random", "static"]
    assert rows[1][1] == "not past the plateau" and rows[4][2].startswith(("0.", "1.")) and rows[4][2] != rows[5][2]
    assert rows[1][7] == rows[2][7] and float(rows[1][7].replace(",", "")) >= 1500  # tokens
    begun.clear()
    shutil.rmtree(output / "runs" / "many" / "rate-1" / "seed-1")
    again = call_here(main, "study", *words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert begun == ["many/rate-1/seed-1"] * 2
    # The last column has the seconds of a run.
    assert [row[:-1] for row in table(output)] == rows


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("objective: {mask_prob: 0.2}", "objective: {maskprob: 0.2}", ("objective.maskprob", "mask_prob")),
        ("{set: {objective: {mask_prob: 0.4}}}", "{starts_from: few, set: {model: {vocab_size: 500}}}",
         ("arms.many", "wordpiece of 500", "wordpiece of 400")),
    ],
)
def test_a_mistake_is_refused_before_text_is_read(
    right: str, wrong: str, said: tuple[str, ...], begun: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(STUDY.replace(right, wrong))
    words = [tmp_path / "mine.yaml", "--output", tmp_path / "out", "--corpus", tmp_path / "missing.txt"]
    done = call_here(main, "study", *words)
    assert done.returncode == 2 and all(word in done.stderr for word in said), done.stderr
    assert not (tmp_path / "out" / "data" / "corpus").exists()


def test_a_folder_without_files_is_refused_before_text_is_read(begun: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(STUDY)
    words = [tmp_path / "mine.yaml", "--output", tmp_path / "out", "--corpus", tmp_path / "missing.txt"]
    done = call_here(main, "study", *words, "--data", tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: --data {tmp_path}: no folder of conll2003-pos; see --help\n")
    assert begun == [] and not (tmp_path / "out").exists()


def test_a_point_is_one_run(begun: list[str], tmp_path: Path) -> None:
    write_corpus(tmp_path / "mine.txt", num_documents=60, seed=3, format="text")
    (tmp_path / "mine.yaml").write_text(STUDY)
    words = [tmp_path / "mine.yaml", "--output", tmp_path / "out", "--corpus", tmp_path / "mine.txt"]
    done = call_here(main, "study", *words, "--point", 2)
    assert done.returncode == 2 and "the study has the points 0 to 1" in done.stderr and begun == []

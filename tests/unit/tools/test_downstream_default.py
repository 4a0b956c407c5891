"""The tasks that are made of the corpus: labels, balance, and no text of one part in the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.apps.downstream.prepare import read_parts
from ctxlm_ds.apps.downstream.task import load_task
from ctxlm_ds.errors import DataError
from tools.downstream_default import write_tasks

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "seldom")


def write_corpus(folder: Path) -> None:
    folder.mkdir()
    for part, modules in (("train", 5), ("heldout", 2)):
        lines = []
        for name in NAMES:
            for module in range(1 if name == "seldom" else modules):
                text = [f"This is the {part} sentence number {at} of module {module} {name[::-1]}." for at in range(8)]
                text.append(f"This sentence of {name} gives the name of its package away.")
                lines.append(json.dumps({"title": f"{name}.m{module}", "text": "\n".join(text)}))
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")


def test_tasks_are_balanced_and_apart(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    write_tasks(tmp_path / "corpus", tmp_path / "tasks")
    _, task = load_task(str(tmp_path / "tasks" / "package.yaml"))
    parts = read_parts(task, tmp_path / "tasks" / "package")
    assert {one.label for one in parts.train} == set(NAMES[:6])
    assert all(sum(one.label == name for one in parts.train) == 40 for name in NAMES[:6])
    assert not {one.text for one in parts.train} & {one.text for one in parts.dev}
    assert not any(name in one.text for one in parts.train for name in NAMES)
    _, task = load_task(str(tmp_path / "tasks" / "follows.yaml"))
    parts = read_parts(task, tmp_path / "tasks" / "follows")
    assert {one.label for one in parts.train} == {"follows", "another"}
    assert all("number" in str(one.pair) or "away" in str(one.pair) for one in parts.train)
    before = (tmp_path / "tasks" / "package" / "dev.tsv").read_bytes()
    write_tasks(tmp_path / "nothing", tmp_path / "tasks")
    assert (tmp_path / "tasks" / "package" / "dev.tsv").read_bytes() == before


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the corpus of make pretrain is missing"):
        write_tasks(tmp_path, tmp_path / "tasks")
    assert not (tmp_path / "tasks").exists()

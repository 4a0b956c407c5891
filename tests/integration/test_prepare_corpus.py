"""A published corpus by name on small stand-ins for its sources: prepared, checked, tokenized, recorded."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.route import ROOT, environment, tool
from tests.text import make_documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for an extracted Wikipedia and for BookCorpus, a sentence a row."""
    folder = tmp_path_factory.mktemp("corpora")
    articles = [text for text in make_documents(60, seed=1) if len(text.split()) > 40]
    pages = "".join(
        f'<doc id="{number}" url="u" title="T{number}">\nT{number}\n\n{text}\n\nReferences\nSmith 1990.\n</doc>\n'
        for number, text in enumerate([*articles, articles[0]])
    )
    (folder / "wiki_00").write_text(pages)
    rows = [{"text": sentence} for text in make_documents(40, seed=2) for sentence in text.split("\n")]
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_published_corpora_are_listed() -> None:
    listed = tool("prepare_corpus.py", "--list").stdout
    for name in ("bookcorpus-wikipedia", "cc-news", "openwebtext", "stories", "wikipedia-LANG"):
        assert f"\n{name} " in listed


def test_a_corpus_by_name_from_sources_to_a_dataset(folder: Path) -> None:
    out = folder / "out"
    replaced = ["--replace", "wikipedia", folder / "wiki_00", "--downloaded", "bookcorpus", folder / "books.jsonl"]
    command = ["--corpus", "bookcorpus-wikipedia", *replaced, "--output-dir", out, "--min-words", 10, "--workers", 1]
    done = tool("prepare_corpus.py", *command, check=False)
    shown = done.stdout
    assert done.returncode == 1, done.stderr  # the stand-in for a download is not as large as the published corpus
    assert "bookcorpus (copy): no longer given out by its makers" in shown
    assert (shown.count("not checked"), shown.count("NOT AS PUBLISHED"), shown.count("as published")) == (2, 2, 0)
    assert "exact_duplicates" in shown and "the same words as an earlier document 1" in shown
    assert f"--input '{out}/wikipedia-*.jsonl.zst'" in shown and "--workers" not in shown
    assert "- name: bookcorpus" in (out / "blend.yaml").read_text() and f"{out}/blend.yaml" in shown

    tool("train_tokenizer.py", "--input", out / "*.zst", "--type", "wordpiece", "--vocab-size", 300,
         "--output-dir", folder / "tok")  # fmt: skip
    tool("preprocess_data.py", "--input", out / "wikipedia-*.jsonl.zst", "--tokenizer", folder / "tok",
         "--split-sentences", "--output-prefix", folder / "data-wikipedia", "--workers", 1)  # fmt: skip
    dataset = json.loads((folder / "data-wikipedia_text_sentence.json").read_text())
    report = json.loads((out / "corpus.json").read_text())
    assert dataset["documents"] == report["sources"][0]["written"]["documents"]
    assert dataset["cleaning"] == [{"corpus": "bookcorpus-wikipedia", **stage} for stage in report["stages"]]
    assert {stage["stage"] for stage in dataset["cleaning"]} == {"cleaning", "empty", "length", "exact_duplicates"}


def test_counts_that_are_not_as_published_end_with_status_1(folder: Path) -> None:
    recipe = folder / "mine.yaml"
    recipe.write_text(
        f"name: mine\nsources:\n- name: books\n  input: [{folder}/books.jsonl]\n  expected:\n"
        "  - {measure: records_read, count: 5, published: a paper}\n"
    )
    done = tool("prepare_corpus.py", "--corpus", recipe, "--output-dir", folder / "mine", check=False)
    assert done.returncode == 1 and "published 5" in done.stdout and "NOT AS PUBLISHED" in done.stdout
    assert (folder / "mine/corpus.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "openwebtxt"], "did you mean openwebtext"),
        (["--corpus", "openwebtext", "--replace", "webtext", "x"], "webtext: name a source of openwebtext"),
        (["--input", "x", "--min-letters", "2"], "--min-letters 2"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = tool("prepare_corpus.py", *arguments, "--output-dir", tmp_path / "out", check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_of_which_nothing_is_left_ends_with_status_1(folder: Path) -> None:
    command = ["--input", folder / "books.jsonl", "--output-dir", folder / "none", "--min-words", 1000, "--workers", 1]
    done = tool("prepare_corpus.py", *command, check=False)
    assert done.returncode == 1 and "no document was left of" in done.stderr
    assert "next:" not in done.stdout and not (folder / "none/blend.yaml").exists()


def test_sigterm_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_bytes((folder / "books.jsonl").read_bytes() * 2000)
    command = [sys.executable, "tools/prepare_corpus.py", "--input", str(tmp_path / "long.jsonl"), "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--output-dir", str(tmp_path / "out")],
        cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not list(tmp_path.glob("out.partial-*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert "interrupted; nothing incomplete was kept" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["long.jsonl"]

"""The report: its figures counted by hand, and the tools that print it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.report import report_lines, tokenizer_report
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents

TOOLS = Path(__file__).parents[3] / "tools"
TEXTS = make_documents(120, seed=2)


def _run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    with open(file, "w", encoding="utf-8") as handle:
        for number, text in enumerate(TEXTS):
            handle.write(json.dumps({"text": text, "lang": "de" if number % 3 == 0 else "en"}) + "\n")
        handle.write("{not json\n")
    return file


def test_figures_of_a_vocabulary_known_by_heart(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("elmo", ["a a a b b c"], 6, tmp_path / "t")
    report = tokenizer_report(tokenizer, [("x", "a b zz, a"), ("y", "c c"), ("x", "b")])
    assert list(report) == ["x", "y", "all"]
    assert report["x"] == {
        "documents": 2, "words": 6, "tokens": 6, "fertility": 1.0, "characters_per_token": round(10 / 6, 4),
        "unknown_rate": round(2 / 6, 6), "whole_words": round(4 / 6, 4),
    }  # fmt: skip
    assert (report["y"]["unknown_rate"], report["all"]["words"], report["all"]["unknown_rate"]) == (0.0, 8, 0.25)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_fertility_is_tokens_by_words(tmp_path: Path, kind: str) -> None:
    tokenizer = train_tokenizer(kind, TEXTS, 400, tmp_path / "t")
    words = [["the", "harbour", "thorzedulba"], ["quiet"]]
    report = tokenizer_report(tokenizer, [("all", " ".join(line)) for line in words])["all"]
    tokens = sum(map(len, tokenizer.encode_batch([" ".join(line) for line in words])))
    assert report["fertility"] == round(tokens / 4, 4) and report["unknown_rate"] == 0
    alone = tokenizer.encode_batch([tokenizer.sentence_prefix + word for line in words for word in line])
    assert report["whole_words"] == sum(len(ids) == 1 for ids in alone) / 4 and 0 < report["whole_words"] < 1


@pytest.mark.parametrize(
    ("keys", "flag"), [({"key_flags": "--json-key and --language-key"}, "--language-key"), ({}, "--json-keys")]
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_missing_key_is_told_by_its_flag(tmp_path: Path, keys: dict[str, str], flag: str, kind: str) -> None:
    file = tmp_path / f"x.{kind}"
    if kind == "jsonl":
        file.write_text('{"text": "x", "lang": "de"}\n')
    else:
        parquet.write_table(pyarrow.table({"text": ["x"], "lang": ["de"]}), file)
    with pytest.raises(DataError, match=f"has no (key|column) 'lung'.*lang, text; see .*{flag}\\b(?!s)"):
        list(Corpus([str(file)], ["text", "lung"], **keys).documents())


def test_the_tools_print_the_same_figures(tmp_path: Path, corpus: Path) -> None:
    folder, figures = tmp_path / "tok", tmp_path / "figures.json"
    common = ["--input", str(corpus), "--max-bad-records", "1"]
    made = _run(
        "train_tokenizer.py", *common, "--type", "wordpiece", "--vocab-size", "500", "--output-dir", str(folder)
    )
    assert made.returncode == 0, made.stderr
    record = json.loads((folder / "ctxlm_tokenizer.json").read_text())
    lines = report_lines({str(folder): {**record, "languages": record["report"]}})
    assert "\n".join(lines) in made.stdout and "next: python tools/preprocess_data.py" in made.stdout
    other = tmp_path / "other"
    train_tokenizer("bpe", TEXTS, 400, other)
    told = _run(
        "tokenizer_report.py", *common, "--tokenizer", str(folder), str(other), "--language-key", "lang", "--json",
        str(figures),
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    reports = json.loads(figures.read_text())
    assert list(reports) == [str(folder), str(other)]
    assert reports[str(folder)]["languages"]["all"] == record["report"]["all"]
    assert [line.split()[2] for line in told.stdout.splitlines()[1:]] == ["de", "en", "all"] * 2
    documents = [("de" if number % 3 == 0 else "en", text) for number, text in enumerate(TEXTS)]
    assert reports[str(other)]["languages"] == tokenizer_report(load_tokenizer(other), documents)


def test_bad_records_beyond_the_limit_and_missing_languages_end_the_tools(tmp_path: Path, corpus: Path) -> None:
    made = _run("train_tokenizer.py", "--input", str(corpus), "--type", "bpe", "--output-dir", str(tmp_path / "t"))
    assert made.returncode == 2 and "--max-bad-records" in made.stderr and "Traceback" not in made.stderr
    assert not (tmp_path / "t").exists()
    made = _run(
        "train_tokenizer.py", "--input", str(corpus), "--type", "elmo", "--output-dir", str(tmp_path / "t"),
        "--extra-ids", "5",
    )  # fmt: skip
    assert made.returncode == 2 and "extra_ids is no setting of elmo" in made.stderr


def test_a_killed_training_leaves_no_folder(tmp_path: Path, corpus: Path) -> None:
    """kill -9 while it trains, and as soon as it writes: the folder is not there, or it is whole."""
    for moment in ("*.jsonl", "*.partial-*", "*.partial-*/tokenizer.json"):
        folder = tmp_path / str(len(moment)) / "tok"
        folder.parent.mkdir()
        (folder.parent / "begin.jsonl").touch()
        command = [sys.executable, str(TOOLS / "train_tokenizer.py"), "--input", str(corpus), "--type", "unigram"]
        command += ["--vocab-size", "400", "--max-bad-records", "1", "--output-dir", str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list(folder.parent.glob(moment)):
            time.sleep(0.001)
        process.kill()
        process.wait()
        if folder.exists():
            assert load_tokenizer(folder).vocab_size == 400

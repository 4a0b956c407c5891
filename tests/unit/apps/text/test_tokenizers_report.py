"""tools/tokenizer_report.py and the report of tools/train_tokenizer.py: the same figures, mistakes by their flags."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.text.tokenizers import report_lines
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.report import tokenizer_report
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.unit.tokenizers.test_report import TEXTS

TOOLS = Path(__file__).parents[4] / "tools"


def run_tool(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
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


def test_the_tools_print_the_same_figures(tmp_path: Path, corpus: Path) -> None:
    folder, figures = tmp_path / "tok", tmp_path / "figures.json"
    common = ["--input", str(corpus), "--max-bad-records", "1"]
    made = run_tool(
        "train_tokenizer.py", *common, "--type", "wordpiece", "--vocab-size", "500", "--output-dir", str(folder)
    )
    assert made.returncode == 0, made.stderr
    record = json.loads((folder / "ctxlm_tokenizer.json").read_text())
    lines = report_lines({str(folder): {**record, "languages": record["report"]}})
    assert "\n".join(lines) in made.stdout and "next: ctxlm preprocess" in made.stdout
    other = tmp_path / "other"
    train_tokenizer("bpe", TEXTS, 400, other)
    told = run_tool(
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
    made = run_tool("train_tokenizer.py", "--input", str(corpus), "--type", "bpe", "--output-dir", str(tmp_path / "t"))
    assert made.returncode == 2 and "--max-bad-records" in made.stderr and "Traceback" not in made.stderr
    assert not (tmp_path / "t").exists()
    made = run_tool(
        "train_tokenizer.py", "--input", str(corpus), "--type", "elmo", "--output-dir", str(tmp_path / "t"),
        "--extra-ids", "5",
    )  # fmt: skip
    assert made.returncode == 2 and "extra_ids is no setting of elmo" in made.stderr

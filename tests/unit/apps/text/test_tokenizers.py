"""tools/train_tokenizer.py: the same command again is done at once.

Samples of languages by their share of the text; tools/tokenizer_report.py has the same figures as the training.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from ctxlm_ds.apps.text.tokenizers import LanguageSample, build_parser, main, report, report_lines
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import tokenizer_report, tokenizer_types, train_tokenizer
from tests.integration.route import Finished, call_here
from tests.unit.tokenizers.conftest import TEXTS


def train(*arguments: object) -> Finished:
    return call_here(main, "train_tokenizer.py", *arguments)


@pytest.mark.parametrize("name", tokenizer_types())
def test_every_type_can_be_asked_for(name: str, tmp_path: Path) -> None:
    """The input is missing: a known type gets as far as that."""
    assert re.search(rf"\b{name}\b", build_parser().format_help())
    words = ("--input", tmp_path / "none.txt", "--output-dir", tmp_path / "tok", "--type")
    assert "none.txt" in train(*words, name).stderr
    assert f"--type {name}2: choose one of wordpiece" in train(*words, f"{name}2").stderr


def test_the_same_command_again_is_done_at_once(tmp_path: Path) -> None:
    corpus, folder = tmp_path / "corpus.txt", tmp_path / "tokenizer"
    corpus.write_text("\n\n".join(TEXTS))
    words = ("--input", corpus, "--type", "wordpiece", "--vocab-size", 400, "--output-dir", folder)
    assert train(*words).returncode == 0
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = train(*words)
    assert again.returncode == 0 and "complete already" in again.stdout
    other = train(*words, "--cased")
    assert other.returncode == 2 and "lowercase true -> false" in other.stderr
    corpus.write_text("another text\n" * 50)
    assert "made differently: input" in train(*words).stderr
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    with open(file, "w", encoding="utf-8") as handle:
        for number, text in enumerate(TEXTS):
            handle.write(json.dumps({"text": text, "lang": "de" if number % 3 == 0 else "en"}) + "\n")
        handle.write("{not json\n")
    return file


LANGUAGES = {"large": 900, "middle": 90, "small": 9}


def language_documents() -> list[tuple[str, str]]:
    """Documents of three languages in turn, of 20 to 60 bytes."""
    return [
        (language, f"{language} {number:05d} " + "é" * (number % 20))
        for number in range(900)
        for language, count in LANGUAGES.items()
        if number < count
    ]


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("max_bytes", [None, 20_000])
def test_languages_have_their_share_to_the_power_of_the_exponent(exponent: float, max_bytes: int | None) -> None:
    sample = LanguageSample(language_documents, exponent, max_bytes, seed=3)
    sizes = {name: sum(len(text.encode()) for one, text in language_documents() if one == name) for name in LANGUAGES}
    assert sample.bytes_by_language == sizes
    weights = {name: (size / sum(sizes.values())) ** exponent for name, size in sizes.items()}
    found = dict.fromkeys(LANGUAGES, 0)
    for text in sample:
        found[text.split()[0]] += len(text.encode())
    wanted = sum(sizes.values()) if max_bytes is None else max_bytes
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert sample.shares[name] == pytest.approx(share)
        # Each text comes a whole number of times; which of two is a draw.
        assert abs(found[name] - share * wanted) <= 4 * 60 * math.sqrt(LANGUAGES[name]) / 2
    assert len(list(sample.lines())) == 3


def test_texts_come_equally_often_and_the_seed_decides_which_once_more() -> None:
    first, again, other = (list(LanguageSample(language_documents, 0.3, None, seed)) for seed in (1, 1, 2))
    assert first == again != other
    counts = Counter(text for text in first if text.startswith("small"))
    assert len(counts) == 9 and max(counts.values()) - min(counts.values()) <= 1
    assert list(LanguageSample(language_documents, 1.0)) == [text for _, text in language_documents()]


def test_the_tools_print_the_same_figures(tmp_path: Path, corpus: Path) -> None:
    folder, figures = tmp_path / "tok", tmp_path / "figures.json"
    common = ("--input", corpus, "--max-bad-records", 1)
    made = train(*common, "--type", "wordpiece", "--vocab-size", 500, "--output-dir", folder)
    assert made.returncode == 0, made.stderr
    record = json.loads((folder / "ctxlm_tokenizer.json").read_text())
    lines = report_lines({str(folder): {**record, "languages": record["report"]}})
    assert "\n".join(lines) in made.stdout and "next: ctxlm preprocess" in made.stdout
    other = tmp_path / "other"
    train_tokenizer("bpe", TEXTS, 400, other)
    words = ("--tokenizer", folder, other, "--language-key", "lang", "--json", figures)
    told = call_here(report, "tokenizer_report.py", *common, *words)
    assert told.returncode == 0, told.stderr
    reports = json.loads(figures.read_text())
    assert list(reports) == [str(folder), str(other)]
    assert reports[str(folder)]["languages"]["all"] == record["report"]["all"]
    assert [line.split()[2] for line in told.stdout.splitlines()[1:]] == ["de", "en", "all"] * 2
    documents = [("de" if number % 3 == 0 else "en", text) for number, text in enumerate(TEXTS)]
    assert reports[str(other)]["languages"] == tokenizer_report(load_tokenizer(other), documents)


def test_bad_records_beyond_the_limit_and_missing_languages_end_the_tools(tmp_path: Path, corpus: Path) -> None:
    made = train("--input", corpus, "--type", "bpe", "--output-dir", tmp_path / "t")
    assert made.returncode == 2 and "--max-bad-records" in made.stderr and "Traceback" not in made.stderr
    assert not (tmp_path / "t").exists()
    made = train("--input", corpus, "--type", "elmo", "--output-dir", tmp_path / "t", "--extra-ids", 5)
    assert made.returncode == 2 and "extra_ids is no setting of elmo" in made.stderr

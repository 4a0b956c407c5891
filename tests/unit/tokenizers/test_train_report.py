"""The report: its figures counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from ctxlm_ds.data.dataset.inspection import unknown_advice
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.train import tokenizer_report, train_tokenizer
from tests.text import make_documents

TEXTS = make_documents(120, seed=2)


def test_figures_of_a_vocabulary_known_by_heart(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("elmo", ["a a a b b c"], 6, tmp_path / "t")
    report = tokenizer_report(tokenizer, [("x", "a b zz, a"), ("y", "c c"), ("x", "b")])
    assert list(report) == ["x", "y", "all"]
    assert report["x"] == {
        "documents": 2, "words": 6, "tokens": 6, "fertility": 1.0, "characters_per_token": round(10 / 6, 4),
        "unknown_rate": round(2 / 6, 6), "whole_words": round(4 / 6, 4),
    }  # fmt: skip
    assert (report["y"]["unknown_rate"], report["all"]["words"], report["all"]["unknown_rate"]) == (0.0, 8, 0.25)


@pytest.mark.parametrize(
    ("words", "text", "cause"),
    [
        (["é", "a", "t"], "e\u0301 a t", "decomposed accents (NFD): compose them"),
        (["강", "물"], "강 물", "the normalizer changes letters that the vocabulary has (강 물)"),
        (["a", "t"], "a ж t ж я", "the vocabulary lacks ж я: train a tokenizer"),
        (["a", "t"], "a t aaaa", ""),
    ],
)
def test_the_cause_of_unknown_tokens_is_looked_for(tmp_path: Path, words: list[str], text: str, cause: str) -> None:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": "강" in words}))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (result,) = preprocess([str(tmp_path / "text.txt")], tmp_path / "vocab.txt", tmp_path / "set", PreprocessConfig())
    found = result.metadata["unknown_cause"]
    assert found.startswith(cause) and bool(found) == bool(cause)
    advice = unknown_advice(result.metadata["unknown_tokens"], result.metadata["tokens"], result.metadata)
    assert advice.endswith(found or "their text is lost")


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

"""The JSON of a dataset: damaged, of another dataset, with fields of another type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.data.dataset.test_reader import documents_of, expect_refusal, write_documents


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_documents(tmp_path / "data", documents_of(1, 1000), vocab_size=1000)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"format": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ("[]", "expected an object"),
        ('{"format": "other"}', "does not describe"),
    ],
)
def test_damaged_json(prefix: Path, content: str, message: str) -> None:
    Path(f"{prefix}.json").write_text(content)
    expect_refusal(prefix, r"data\.json: sha256 .* --write-manifest")
    Path(f"{prefix}.sha256").unlink()
    expect_refusal(prefix, message)


@pytest.mark.parametrize(("key", "value"), [("tokens", 5), ("documents", 1), ("sequences", 0), ("dtype", "int32")])
def test_json_of_another_dataset(prefix: Path, key: str, value: object) -> None:
    path = Path(f"{prefix}.json")
    Path(f"{prefix}.sha256").unlink()
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    expect_refusal(prefix, f"says {key}")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    expect_refusal(prefix, "version 2")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", "many", "vocab_size is 'many' .*valid integer"),
        ("vocab_size", -3, "vocab_size is '-3' .*greater than or equal to 0"),
        ("split_sentences", 1, "split_sentences is '1' .*valid boolean"),
        ("tokenizer_path", ["tok"], "tokenizer_path is .*valid string"),
        ("inputs", [1], r"inputs is '\[1\]' .*valid string"),
        ("sha256", {"bin": None}, "sha256 is .*valid string"),
        ("eod_id", 1000, "eod_id 1000 is outside the vocabulary of 1000"),
        ("parts", ["a"], "parts is .*valid dictionary"),
        ("shard", [3, 3], r"shard is \[3, 3\]"),
    ],
)
def test_json_with_fields_of_another_type(prefix: Path, key: str, value: object, message: str) -> None:
    Path(f"{prefix}.sha256").unlink()
    path = Path(f"{prefix}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    expect_refusal(prefix, message)

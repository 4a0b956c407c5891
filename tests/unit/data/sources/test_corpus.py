"""A corpus as documents: keys, and bad records left out up to a limit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ctxlm_ds.data.sources.corpus import MAX_KEPT, Corpus
from ctxlm_ds.errors import DataError
from tests.text import write_corpus
from tests.unit.data.preprocess.test_job_resume import contents_of, run
from tests.unit.data.sources.documents import parsed


def test_a_corpus_leaves_bad_records_out_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "one"}\nbroken\n{"text": "two"}\n{}\n')
    assert list(Corpus([str(path)], max_bad_records=2)) == ["one", "two"]
    assert list(Corpus([str(path)], max_bad_records=2).documents()) == [{"text": "one"}, {"text": "two"}]
    with pytest.raises(DataError, match=r"line 4: has no key 'text'.*more than the 1 allowed"):
        list(Corpus([str(path)], max_bad_records=1))


def test_several_keys(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", 3)
    items = parsed(tmp_path / "corpus.jsonl", "title", "text")
    assert [list(item) for item in items if isinstance(item, dict)] == [["title", "text"]] * 3
    (tmp_path / "corpus.txt").write_text("plain")
    with pytest.raises(DataError, match="one text per document"):
        Corpus([str(tmp_path / "corpus.txt")], ["title", "text"])
    with pytest.raises(DataError, match="each key once"):
        Corpus([str(tmp_path / "corpus.jsonl")], ["text", "text"])


POLISH = "plain\n\nzażółć"


def test_bad_records_are_counted_and_the_first_kept(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxlm_ds.data.sources.reading.CHUNK_BYTES", 4000)
    lines = ['{"text": "Fine text."}', "{broken", '{"title": "x"}'] * 1500
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines))
    contents = []
    for workers in (1, 2):
        result = run([path], tokenizer, tmp_path / "data", max_bad_records=3000, workers=workers, overwrite=True)
        contents.append(contents_of(result.prefix))
    assert contents[0] == contents[1]
    assert result.metadata["bad_records"] == 3000
    assert list(result.metadata["bad_record_reasons"].values()) == [1500, 1500]
    entries = [json.loads(line) for line in contents[0][".errors.jsonl"].splitlines()]
    assert len(entries) == MAX_KEPT
    assert [entry["position"] for entry in entries] == sorted({entry["position"] for entry in entries})
    assert {lines[entry["position"] - 1] for entry in entries} == {"{broken", '{"title": "x"}'}
    assert all(lines[entry["position"] - 1] == entry["excerpt"] for entry in entries)
    fine = tmp_path / "fine.jsonl"
    fine.write_text(lines[0])
    assert ".errors.jsonl" not in contents_of(run([fine], tokenizer, tmp_path / "data", overwrite=True).prefix)


def test_too_many_bad_records_are_told_with_their_reasons(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(["{"] * 30 + ['{"text": "Fine text."}'] * 70))
    assert run([path], tokenizer, tmp_path / "data", max_bad_records=30).metadata["bad_records"] == 30
    message = r"30 of 100 records are no documents \(30 not valid JSON\), more than the 29 allowed"
    with pytest.raises(DataError, match=message):
        run([path], tokenizer, tmp_path / "more", max_bad_records=29)


UNKNOWN = "if its encoding is another (`file -bi` tries to find it): convert it, iconv -f ENCODING"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (POLISH.encode("iso-8859-2"), UNKNOWN),
        ("Привет, мир — да.".encode("windows-1251"), UNKNOWN),
        ("こんにちは世界。".encode("shift_jis"), UNKNOWN),
        (
            "No one came \u2014 ever.".encode("windows-1252"),
            "its encoding is probably WINDOWS-1252: convert it, iconv -f WINDOWS-1252",
        ),
        (POLISH.encode("utf-16"), "the file is UTF-16: convert it, iconv -f UTF-16"),
    ],
)
def test_another_encoding_has_its_remedy(tmp_path: Path, tokenizer: Path, content: bytes, told: str) -> None:
    path = tmp_path / "a text.txt"
    path.write_bytes(content)
    message = re.escape(f"; {told} -t UTF-8 '{path}' > NEW, or skip such records")
    with pytest.raises(DataError, match=message):
        run([path], tokenizer, tmp_path / "data", max_bad_records=0)


@pytest.mark.parametrize("content", ['[{"text": "a"}, {"text": "b"}]', '[\n {"text": "a"}\n]', '{\n  "text": "a"\n}'])
def test_a_file_of_one_json_value_has_its_remedy(tmp_path: Path, tokenizer: Path, content: str) -> None:
    path = tmp_path / "text.json"
    path.write_text(content)
    message = rf"line 1: not .*; the file is one JSON value: write .* jq -c '\.\[\]' {path} > NAME\.jsonl$"
    with pytest.raises(DataError, match=message):
        run([path], tokenizer, tmp_path / "data", max_bad_records=0)


def test_an_input_without_a_readable_record_says_so(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("{\n" * 6)
    with pytest.raises(DataError, match=r"holds no text: all 6 records were unreadable \(6 not valid JSON\)"):
        run([path], tokenizer, tmp_path / "data", max_bad_records=6)
    with pytest.raises(DataError, match=r"holds no text: all 6 records were unreadable \(6 not valid JSON\)"):
        list(Corpus([str(path)], max_bad_records=6))

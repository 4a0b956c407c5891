"""A corpus as documents: keys, and bad records left out up to a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.errors import DataError
from tests.text import write_corpus
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

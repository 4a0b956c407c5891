"""Records parsed: WikiExtractor's articles, keys, and what is wrong with a record, by its line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ctxlm_ds.data.sources.types import BadRecord
from ctxlm_ds.errors import DataError
from tests.unit.data.sources.documents import parsed, texts_of

WIKI = """<doc id="12" url="https://en.wikipedia.org/wiki?curid=12" title="A &amp; &quot;B&quot;">
A &amp; "B"

First paragraph.

Second &lt; third &amp;amp; so on.

</doc>
<doc id="13" url="u" title="Empty">
Empty

</doc>
stray line
<doc id="14" url="u" title="Open">
Open

never closed
<doc id="15" url="u" title="Other">
The first line is text.
</doc>
"""


def test_wikiextractor_output(tmp_path: Path) -> None:
    (tmp_path / "wiki_07").write_text(WIKI)
    items = parsed(tmp_path / "wiki_07", "title", "id", "text")
    assert [item for item in items if isinstance(item, dict)] == [
        {"title": 'A & "B"', "id": "12", "text": "First paragraph.\n\nSecond < third &amp; so on."},
        {"title": "Empty", "id": "13", "text": ""},
        {"title": "Other", "id": "15", "text": "The first line is text."},
    ]
    assert [(item.position, item.reason, item.excerpt[:9]) for item in items if isinstance(item, BadRecord)] == [
        (13, "outside of <doc> ... </doc>", b"stray lin"),
        (14, "no </doc> at the end", b'<doc id="'),
    ]
    (tmp_path / "wiki_08").write_text('{"id": "12", "text": "as JSON"}\n')
    (tmp_path / "wiki_09.gz").write_bytes(gzip.compress(b'{"id": "13", "text": "packed JSON"}\n'))
    assert texts_of(tmp_path / "wiki_08") == ["as JSON"] and texts_of(tmp_path / "wiki_09.gz") == ["packed JSON"]
    (tmp_path / "articles").write_text(WIKI.partition("stray")[0])
    assert len(texts_of(tmp_path / "articles", "wikiextractor")) == 2


def test_records_of_nothing_but_nul_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(bytes(3000) + b'\n{"text": "\\u0000\\u0000"}\n{"text": "a\\u0000b"}\n')
    (tmp_path / "b.txt").write_bytes(bytes(70) + b"\n\n" + b"text\0\n\n" + bytes(5))
    reasons = [getattr(item, "reason", "") for name in ("a.jsonl", "b.txt") for item in parsed(tmp_path / name)]
    nul = "nothing but NUL bytes"
    assert reasons == [nul, nul, "", nul, "", nul]


def test_bad_records_name_file_line_and_reason(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b"{broken",
        b"",
        b'{"title": "no text"}',
        b'["a list"]',
        b'{"text": 5}',
        b'{"text": null}',
        b'{"text": "caf\xe9"}',
        b"[" * 100_000,
        b'{"text": "half \\ud800 pair"}',
        b'{"text": "last"}',
        b'{"text": "cut off',
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join(lines))
    good = [item["text"] for item in parsed(path) if isinstance(item, dict)]
    assert good == ["good", "", "half ? pair", "last"]
    bad = [str(item) for item in parsed(path) if isinstance(item, BadRecord)]
    expected = [
        ("line 2", "not valid JSON"),
        ("line 4", "has no key 'text' (its keys: title; see --json-keys)"),
        ("line 5", "not a JSON object (a list, an object with 'text' is expected)"),
        ("line 6", "the value of 'text' is not text (a number)"),
        ("line 8", "not valid UTF-8 (byte 0xe9 at 13)"),
        ("line 9", "nested too deeply"),
        ("line 12", "not valid JSON (Unterminated string starting at column 10)"),
    ]
    assert len(bad) == len(expected)
    for message, (place, reason) in zip(bad, expected, strict=True):
        assert message.startswith(f"{path}, {place}: ") and reason in message
    with pytest.raises(DataError, match="line 2: not valid JSON"):
        texts_of(path)

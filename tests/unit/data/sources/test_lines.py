"""Records of lines: too long ones, documents between blank lines, a text without any, and compressed files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ctxlm_ds.data.sources import lines, reading
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks
from ctxlm_ds.data.sources.types import BadRecord, InputShard
from ctxlm_ds.errors import DataError
from tests.text import make_documents, write_corpus
from tests.unit.data.sources.documents import parsed, texts_of
from tests.unit.data.sources.test_reading import FORMATS


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("format", ["jsonl", "text", "wikiextractor", "lines:3"])
def test_too_long_records_are_passed_over(
    tmp_path: Path, format: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_RECORD_BYTES", 7_000)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 700)
    records = {
        "jsonl": [json.dumps({"text": "x" * size}).encode() + b"\n" for size in (10, 9_000, 20, 4_000)],
        "text": [b"x" * size + b"\n\n" for size in (10, 9_000, 20, 4_000)],
        "wikiextractor": [b'<doc id="1">\n' + b"xx\n" * (size // 2) + b"</doc>\n" for size in (10, 9_000, 20, 4_000)],
        "lines:3": [b"y\n" + b"x" * size + b"\ny\n" for size in (10, 9_000, 20, 4_000)],
    }[format]
    path = tmp_path / f"corpus{suffix}"
    path.write_bytes(gzip.compress(b"".join(records)) if suffix else b"".join(records))
    sources = find_sources([str(path)], *(("text", format) if ":" in format else (format,)))
    chunks = list(read_chunks(sources))
    items = [item for chunk in chunks for item in parse_chunk(chunk, ["text"])]
    assert [item["text"].count("x") for item in items if isinstance(item, dict)] == [10, 20, 4_000]
    bad = [item for item in items if isinstance(item, BadRecord)]
    assert [(item.reason, item.excerpt) for item in bad] == [("longer than 7,000 bytes", records[1][:200])]
    assert bad[0].position == 1 + records[0].count(b"\n")
    assert max(len(chunk.records) for chunk in chunks) < 8_000


def test_text_documents_are_separated_by_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"\xef\xbb\xbf\n\n one a\none b\r\n\r\n \t \ntwo\n\n\n\nthree\nmore")
    assert texts_of(path) == [" one a\none b", "two", "three\nmore"]
    path.write_bytes(path.read_bytes().replace(b"t", b"\xff"))
    assert [item.position for item in parsed(path) if isinstance(item, BadRecord)] == [7, 11]


@pytest.mark.parametrize(
    ("document", "expected"),
    [("line", ["one", "two", " three", "four"]), ("lines:2", ["one", "two\n three", "four"]),
     ("lines:4", ["one\n\ntwo\n three", "four"]), ("file", ["one\n\ntwo\n three\nfour"]),
     ("blank", ["one", "two\n three\nfour"])],
)  # fmt: skip
@pytest.mark.parametrize("chunk_bytes", [1, 8, 1 << 20])
def test_documents_of_plain_text_are_lines_or_files(
    tmp_path: Path, document: str, expected: list[str], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk_bytes)
    (tmp_path / "corpus.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo\n three\nfour")
    found = find_sources([str(tmp_path / "corpus.txt")], document=document)
    for count in (1, 3):
        shards = [read_chunks(found, shard=InputShard(index, count)) for index in range(count)]
        items = [item for shard in shards for chunk in shard for item in parse_chunk(chunk, ["text"])]
        assert items == [{"text": text} for text in expected]


def test_a_document_that_is_not_known_or_has_no_effect_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    for document in ("lines", "lines:0", "page"):
        with pytest.raises(DataError, match=f"--document {document}: expected line, lines:N"):
            find_sources([str(tmp_path / "a.jsonl")], document=document)
    with pytest.raises(DataError, match="--document line: no input is plain text"):
        find_sources([str(tmp_path / "a.jsonl")], document="line")


def test_a_text_document_without_any_blank_line_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_TEXT_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 300)
    written = [f"line {number} of one endless file." for number in range(500)]
    (tmp_path / "corpus.txt").write_text("\n".join(written))
    documents = texts_of(tmp_path / "corpus.txt")
    assert "\n".join(documents).split("\n") == written
    assert max(map(len, documents)) < 1100 and len(documents) > 10


@pytest.mark.parametrize("format", ["jsonl.gz", "jsonl.xz", "jsonl.bz2", "jsonl.zst"])
def test_joined_compressed_files_are_read_to_the_end(tmp_path: Path, format: str) -> None:
    path = tmp_path / FORMATS[format]
    documents = write_corpus(path, 20, format=format)
    path.write_bytes(path.read_bytes() * 2)
    assert texts_of(path) == documents * 2


@pytest.mark.parametrize("format", ["jsonl.gz", "jsonl.xz"])
def test_zeros_behind_compressed_members_are_padding(tmp_path: Path, format: str) -> None:
    path = tmp_path / FORMATS[format]
    documents = write_corpus(path, 20, format=format)
    path.write_bytes(path.read_bytes() + bytes(400) + path.read_bytes() + bytes(70_000))
    assert texts_of(path) == documents * 2


@pytest.mark.parametrize("format", ["jsonl.gz", "jsonl.xz", "jsonl.bz2", "jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage", "garbage behind", "empty"])
def test_the_damaged_rest_of_a_compressed_file_is_one_bad_record(tmp_path: Path, format: str, damage: str) -> None:
    path = tmp_path / FORMATS[format]
    documents = write_corpus(path, 50, format=format)
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(
        {
            "cut": content * 2 + content[:half],
            "flipped": content * 2 + content[:half] + bytes([content[half] ^ 255]) + content[half + 1 :],
            "garbage": b"{not compressed at all}" * 20,
            "garbage behind": content * 2 + b"{not compressed at all}",
            "empty": b"",
        }[damage]
    )
    write_corpus(tmp_path / "next.jsonl", 3, seed=9)
    found = find_sources([str(path), str(tmp_path / "next.jsonl")])
    items = [item for chunk in read_chunks(found) for item in parse_chunk(chunk, ["text"])]
    bad = [item for item in items if isinstance(item, BadRecord)]
    good = [item["text"] for item in items if isinstance(item, dict)]
    read = good[:-3]
    assert good[-3:] == make_documents(3, 9)
    reason = f"damaged or not {format[6:]} data; the rest of the file is lost"
    assert bad[-1].reason == reason and bad[-1].detail and {item.path for item in bad} == {str(path)}
    if damage == "flipped":  # what a member holds is only proved at its end
        assert read[:100] == documents * 2
        return
    assert read == [] if damage in ("garbage", "empty") else read == (documents * 3)[: len(read)] and len(read) >= 100
    assert [(item.position, item.unit) for item in bad] == [(len(read) + 1, "line")]
    with pytest.raises(DataError, match=rf"{path.name}, line {len(read) + 1}: damaged"):
        texts_of(path)

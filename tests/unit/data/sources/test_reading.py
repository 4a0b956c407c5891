"""Reading corpora: formats, compressions, globs, and what is wrong with a record or a file."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from ctxlm_ds.data.sources import lines, reading
from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks, total_bytes
from ctxlm_ds.data.sources.types import BadRecord
from ctxlm_ds.errors import DataError
from tests.text import make_documents, write_corpus

FORMATS = {
    "text": "corpus.txt",
    "jsonl": "corpus.jsonl",
    "wikiextractor": "wiki_00",
    "parquet": "corpus.parquet",
    "jsonl.gz": "corpus.jsonl.gz",
    "jsonl.xz": "corpus.jsonl.xz",
    "jsonl.bz2": "corpus.json.bz2",
    "jsonl.zst": "corpus.jsonl.zst",
    "text.gz": "corpus.txt.gz",
    "wikiextractor.bz2": "wiki_00.bz2",
}


def _texts(path: Path | str, input_format: str = "auto") -> list[str]:
    return list(Corpus([str(path)], input_format=input_format))


def _parsed(path: Path, *keys: str) -> list[dict[str, str] | BadRecord]:
    wanted = keys or ("text",)
    return [item for chunk in read_chunks(find_sources([str(path)]), wanted) for item in parse_chunk(chunk, wanted)]


@pytest.mark.parametrize("format", list(FORMATS))
def test_every_format_gives_the_same_documents(tmp_path: Path, format: str) -> None:
    documents = write_corpus(tmp_path / FORMATS[format], 120, seed=4, format=format)
    assert _texts(tmp_path / FORMATS[format]) == documents


@pytest.mark.parametrize("format", ["jsonl.gz", "jsonl.xz", "jsonl.bz2", "jsonl.zst"])
def test_joined_compressed_files_are_read_to_the_end(tmp_path: Path, format: str) -> None:
    path = tmp_path / FORMATS[format]
    documents = write_corpus(path, 20, format=format)
    path.write_bytes(path.read_bytes() * 2)
    assert _texts(path) == documents * 2


@pytest.mark.parametrize("format", ["jsonl.gz", "jsonl.xz"])
def test_zeros_behind_compressed_members_are_padding(tmp_path: Path, format: str) -> None:
    path = tmp_path / FORMATS[format]
    documents = write_corpus(path, 20, format=format)
    path.write_bytes(path.read_bytes() + bytes(400) + path.read_bytes() + bytes(70_000))
    assert _texts(path) == documents * 2


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
        _texts(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("format", ["jsonl", "text", "wikiextractor"])
def test_too_long_records_are_passed_over(
    tmp_path: Path, format: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_RECORD_BYTES", 7_000)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 700)
    records = {
        "jsonl": [json.dumps({"text": "x" * size}).encode() + b"\n" for size in (10, 9_000, 20, 4_000)],
        "text": [b"x" * size + b"\n\n" for size in (10, 9_000, 20, 4_000)],
        "wikiextractor": [b'<doc id="1">\n' + b"xx\n" * (size // 2) + b"</doc>\n" for size in (10, 9_000, 20, 4_000)],
    }[format]
    path = tmp_path / f"corpus{suffix}"
    path.write_bytes(gzip.compress(b"".join(records)) if suffix else b"".join(records))
    chunks = list(read_chunks(find_sources([str(path)], format)))
    items = [item for chunk in chunks for item in parse_chunk(chunk, ["text"])]
    assert [item["text"].count("x") for item in items if isinstance(item, dict)] == [10, 20, 4_000]
    bad = [item for item in items if isinstance(item, BadRecord)]
    assert [(item.reason, item.excerpt) for item in bad] == [("longer than 7,000 bytes", records[1][:200])]
    assert bad[0].position == 1 + records[0].count(b"\n")
    assert max(len(chunk.records) for chunk in chunks) < 8_000


def test_records_of_nothing_but_nul_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(bytes(3000) + b'\n{"text": "\\u0000\\u0000"}\n{"text": "a\\u0000b"}\n')
    (tmp_path / "b.txt").write_bytes(bytes(70) + b"\n\n" + b"text\0\n\n" + bytes(5))
    reasons = [getattr(item, "reason", "") for name in ("a.jsonl", "b.txt") for item in _parsed(tmp_path / name)]
    nul = "nothing but NUL bytes"
    assert reasons == [nul, nul, "", nul, "", nul]


def test_a_corpus_leaves_bad_records_out_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "one"}\nbroken\n{"text": "two"}\n{}\n')
    assert list(Corpus([str(path)], max_bad_records=2)) == ["one", "two"]
    assert list(Corpus([str(path)], max_bad_records=2).documents()) == [{"text": "one"}, {"text": "two"}]
    with pytest.raises(DataError, match=r"line 4: has no key 'text'.*more than the 1 allowed"):
        list(Corpus([str(path)], max_bad_records=1))


def test_text_documents_are_separated_by_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"\xef\xbb\xbf\n\n one a\none b\r\n\r\n \t \ntwo\n\n\n\nthree\nmore")
    assert _texts(path) == [" one a\none b", "two", "three\nmore"]
    path.write_bytes(path.read_bytes().replace(b"t", b"\xff"))
    assert [item.position for item in _parsed(path) if isinstance(item, BadRecord)] == [7, 11]


def test_a_text_document_without_any_blank_line_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_TEXT_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 300)
    written = [f"line {number} of one endless file." for number in range(500)]
    (tmp_path / "corpus.txt").write_text("\n".join(written))
    documents = _texts(tmp_path / "corpus.txt")
    assert "\n".join(documents).split("\n") == written
    assert max(map(len, documents)) < 1100 and len(documents) > 10


def test_globs_are_sorted_and_files_taken_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    found = find_sources([str(tmp_path / "*.jsonl"), str(tmp_path / "**" / "*.jsonl"), str(tmp_path / "a.jsonl")])
    assert [Path(source.path).name for source in found] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert total_bytes(found) == sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl"))


def test_wrong_inputs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        find_sources([str(tmp_path / "none.jsonl")])
    with pytest.raises(DataError, match="no file matches"):
        find_sources([str(tmp_path / "*.jsonl")])
    with pytest.raises(DataError, match="is a folder"):
        find_sources([str(tmp_path)])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        find_sources([str(tmp_path / "pipe")])
    for name in ("openwebtext.tar", "books.tar.gz", "dump.zip", "set/data.arrow"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        with pytest.raises(DataError, match="unpack it"):
            find_sources([str(tmp_path / name)])
    with pytest.raises(DataError, match="a parquet file cannot be read compressed; decompress it first"):
        write_corpus(tmp_path / "corpus.parquet.gz", 3)
        find_sources([str(tmp_path / "corpus.parquet.gz")])
    with pytest.raises(DataError, match="no input"):
        find_sources([])
    with pytest.raises(DataError, match="input format 'csv'"):
        find_sources([str(tmp_path)], "csv")


def test_input_format_overrules_the_name(tmp_path: Path) -> None:
    write_corpus(tmp_path / "wiki_00", 5)
    assert _texts(tmp_path / "wiki_00", "jsonl") == make_documents(5)
    assert _texts(tmp_path / "wiki_00", "text")[0].startswith('{"title"')


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
    good = [item["text"] for item in _parsed(path) if isinstance(item, dict)]
    assert good == ["good", "", "half ? pair", "last"]
    bad = [str(item) for item in _parsed(path) if isinstance(item, BadRecord)]
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
        _texts(path)


def test_undecodable_text_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"good\n\nbad \xff\n\ngood again\n")
    items = _parsed(tmp_path / "corpus.txt")
    assert [isinstance(item, BadRecord) for item in items] == [False, True, False]
    assert "line 3: not valid UTF-8" in str(items[1])


def test_several_keys(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", 3)
    items = _parsed(tmp_path / "corpus.jsonl", "title", "text")
    assert [list(item) for item in items if isinstance(item, dict)] == [["title", "text"]] * 3
    (tmp_path / "corpus.txt").write_text("plain")
    with pytest.raises(DataError, match="one text per document"):
        Corpus([str(tmp_path / "corpus.txt")], ["title", "text"])
    with pytest.raises(DataError, match="each key once"):
        Corpus([str(tmp_path / "corpus.jsonl")], ["text", "text"])


@pytest.mark.parametrize("format", ["jsonl", "jsonl.gz", "parquet", "text"])
def test_chunks_are_small_and_bytes_read_grow_to_the_file_size(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 4000)
    path = tmp_path / FORMATS[format]
    documents = write_corpus(path, 200, format=format)
    found = find_sources([str(path)])
    chunks = list(read_chunks(found))
    read = [chunk.bytes_read for chunk in chunks]
    assert len(chunks) > 10 and read == sorted(read) and read[-1] == path.stat().st_size
    assert [item["text"] for chunk in chunks for item in parse_chunk(chunk, ["text"])] == documents  # type: ignore[index]


def test_memory_does_not_grow_with_one_long_file(tmp_path: Path) -> None:
    import tracemalloc

    with gzip.open(tmp_path / "corpus.jsonl.gz", "wb", compresslevel=1) as file:
        line = json.dumps({"text": "word " * 400}).encode() + b"\n"
        for _ in range(15_000):  # 30 MB of text
            file.write(line)
    tracemalloc.start()
    count = sum(chunk.records.count(b"\n") for chunk in read_chunks(find_sources([str(tmp_path / "corpus.jsonl.gz")])))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 15_000 and peak < 6_000_000

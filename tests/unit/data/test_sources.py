"""Reading corpora: formats, compressions, globs, and what is wrong with a record or a file."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from ctxlm_ds.data import sources
from ctxlm_ds.data.corpus import Corpus
from ctxlm_ds.data.sources import BadRecord, find_sources, parse_chunk, read_chunks, total_bytes
from ctxlm_ds.errors import DataError
from tests.text import make_documents, write_corpus

FORMATS = {
    "text": "corpus.txt",
    "jsonl": "corpus.jsonl",
    "parquet": "corpus.parquet",
    "jsonl.gz": "corpus.jsonl.gz",
    "jsonl.xz": "corpus.jsonl.xz",
    "jsonl.bz2": "corpus.json.bz2",
    "jsonl.zst": "corpus.jsonl.zst",
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


@pytest.mark.parametrize("format", ["jsonl.gz", "jsonl.xz", "jsonl.bz2", "jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_damaged_compressed_files(tmp_path: Path, format: str, damage: str) -> None:
    path = tmp_path / FORMATS[format]
    write_corpus(path, 50, format=format)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"{not compressed at all}" * 20)
    with pytest.raises(DataError, match=rf"{path.name}: damaged"):
        _texts(path)


def test_zst_without_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "corpus.jsonl.zst", 5, format="jsonl.zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match="pip install zstandard"):
        _texts(tmp_path / "corpus.jsonl.zst")


def test_damaged_parquet_and_a_missing_column(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.parquet", 20, format="parquet")
    with pytest.raises(DataError, match="no column 'body', only text, title"):
        list(Corpus([str(tmp_path / "corpus.parquet")], ["body"]))
    (tmp_path / "corpus.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="not a readable parquet file"):
        _texts(tmp_path / "corpus.parquet")


def test_text_documents_are_separated_by_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"\xef\xbb\xbf\n\n one a\none b\r\n\r\n \t \ntwo\n\n\n\nthree\nmore")
    assert _texts(path) == [" one a\none b", "two", "three\nmore"]
    chunk = next(read_chunks(find_sources([str(path)])))
    assert [position for position, _ in chunk.records] == [3, 7, 11]


def test_a_text_document_without_any_blank_line_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_TEXT_DOCUMENT_BYTES", 1000)
    lines = [f"line {number} of one endless file." for number in range(500)]
    (tmp_path / "corpus.txt").write_text("\n".join(lines))
    documents = _texts(tmp_path / "corpus.txt")
    assert "\n".join(documents).split("\n") == lines
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
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join(lines))
    good = [item["text"] for item in _parsed(path) if isinstance(item, dict)]
    assert good == ["good", "", "half ? pair", "last"]
    bad = [str(item) for item in _parsed(path) if isinstance(item, BadRecord)]
    expected = [
        ("line 2", "not valid JSON"),
        ("line 4", "has no key 'text' (its keys: title)"),
        ("line 5", "holds a list"),
        ("line 6", "is a int, not text"),
        ("line 8", "not valid UTF-8 (byte 0xe9 at 13)"),
        ("line 9", "nested too deeply"),
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
    with pytest.raises(DataError, match="one text a document"):
        Corpus([str(tmp_path / "corpus.txt")], ["title", "text"])
    with pytest.raises(DataError, match="each key once"):
        Corpus([str(tmp_path / "corpus.jsonl")], ["text", "text"])


@pytest.mark.parametrize("format", ["jsonl", "jsonl.gz", "parquet", "text"])
def test_chunks_are_small_and_bytes_read_grow_to_the_file_size(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 4000)
    path = tmp_path / FORMATS[format]
    documents = write_corpus(path, 200, format=format)
    found = find_sources([str(path)])
    chunks = list(read_chunks(found))
    read = [chunk.bytes_read for chunk in chunks]
    assert len(chunks) > 10 and read == sorted(read) and read[-1] == path.stat().st_size
    assert sum(len(chunk.records) for chunk in chunks) == len(documents)


def test_hugging_face_data_set_streams_from_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    documents = write_corpus(tmp_path / "set" / "train.jsonl", 30)
    assert _texts(f"hf://{tmp_path / 'set'}?split=train") == documents
    with pytest.raises(DataError, match="cannot be read through the datasets library"):
        _texts(f"hf://{tmp_path / 'set'}?split=nowhere")
    with pytest.raises(DataError, match="optionally"):
        _texts(f"hf://{tmp_path / 'set'}?trust=yes")


def test_memory_does_not_grow_with_one_long_file(tmp_path: Path) -> None:
    import tracemalloc

    with gzip.open(tmp_path / "corpus.jsonl.gz", "wb", compresslevel=1) as file:
        line = json.dumps({"text": "word " * 400}).encode() + b"\n"
        for _ in range(15_000):  # 30 MB of text
            file.write(line)
    tracemalloc.start()
    count = sum(len(chunk.records) for chunk in read_chunks(find_sources([str(tmp_path / "corpus.jsonl.gz")])))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 15_000 and peak < 6_000_000

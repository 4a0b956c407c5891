"""Reading corpora: every format, globs, wrong inputs, chunks of bounded size."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from ctxlm_ds.data.sources import reading
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks, total_bytes
from ctxlm_ds.errors import DataError
from tests.text import make_documents, write_corpus
from tests.unit.data.sources.documents import texts_of

FORMATS = {
    "text": "corpus.txt",
    "jsonl": "corpus.jsonl",
    "parquet": "corpus.parquet",
    "jsonl.gz": "corpus.jsonl.gz",
    "jsonl.xz": "corpus.jsonl.xz",
    "jsonl.bz2": "corpus.json.bz2",
    "jsonl.zst": "corpus.jsonl.zst",
}


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
    assert texts_of(tmp_path / "wiki_00", "jsonl") == make_documents(5)
    assert texts_of(tmp_path / "wiki_00", "text")[0].startswith('{"title"')


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

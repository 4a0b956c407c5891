"""Reading corpora: every format, globs, wrong inputs, chunks of bounded size, tables and data sets from the Hub."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from ctxlm_ds.data.sources import reading
from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks, total_bytes
from ctxlm_ds.data.sources.types import BadRecord, InputShard
from ctxlm_ds.errors import DataError
from tests.text import make_documents, write_corpus
from tests.unit.data.sources.documents import parsed, texts_of

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
    os.mkfifo(tmp_path / "pipe")
    packed = ("openwebtext.tar", "books.tar.gz", "dump.zip", "set/data.arrow")
    for name in (*packed, "corpus.parquet.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name, message in [
        ("none.jsonl", "no such file"), ("*.jsonl", "no file matches"), (".", "is a folder"),
        ("pipe", "not a regular file"), *((name, "unpack it") for name in packed),
        ("corpus.parquet.gz", "a parquet file cannot be read compressed; decompress it first"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=message):
            find_sources([str(tmp_path / name)])
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


def test_damaged_parquet_and_a_missing_column(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.parquet", 20, format="parquet")
    with pytest.raises(DataError, match="no column 'body', only text, title"):
        list(Corpus([str(tmp_path / "corpus.parquet")], ["body"]))
    (tmp_path / "corpus.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="row 1: damaged or not parquet data; the rest of the file is lost"):
        texts_of(tmp_path / "corpus.parquet")


def test_what_is_whole_of_a_damaged_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.parquet"
    documents = write_corpus(path, 100, format="parquet")
    content = path.read_bytes()
    group = parquet.ParquetFile(path).metadata.row_group(2).column(1)
    place = group.dictionary_page_offset or group.data_page_offset
    path.write_bytes(content[:place] + b"\xff" * 40 + content[place + 40 :])
    items = parsed(path)
    bad = [item for item in items if isinstance(item, BadRecord)]
    assert [item["text"] for item in items if isinstance(item, dict)] == documents[:40] + documents[60:]
    assert [(item.position, item.reason) for item in bad] == [
        (41, "damaged or not parquet data; the rest of the row group is lost")
    ]


def test_strings_of_every_type_and_undecodable_ones(tmp_path: Path) -> None:
    words = ["one", None, "naïve", "one"]
    columns = {
        "text": pyarrow.array(words),
        "large": pyarrow.array(words, pyarrow.large_string()),
        "coded": pyarrow.array(words).dictionary_encode(),
        "binary": pyarrow.array([b"one", b"\xff\xfe", b"two", b"one"]),
        "list": pyarrow.array([["a"], [], None, ["b"]]),
    }
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 4, columns["binary"].buffers())
    path, keys = tmp_path / "corpus.parquet", ["text", "large", "coded"]
    parquet.write_table(pyarrow.table(columns | {"broken": broken}), path)
    assert parsed(path, *keys) == [dict.fromkeys(keys, word or "") for word in words]
    for key in ("binary", "broken"):
        items = parsed(path, key)
        assert [isinstance(item, BadRecord) for item in items] == [False, True, False, False]
        assert str(items[1]).endswith("row 2: not valid UTF-8 (byte 0xff at 0)")
    not_text = "the value of 'list' is not text"
    assert [getattr(item, "reason", "") for item in parsed(path, "list")] == [not_text, not_text, "", not_text]


def test_hugging_face_data_set_streams_from_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    documents = write_corpus(tmp_path / "set" / "train.jsonl", 30)
    assert texts_of(f"hf://{tmp_path / 'set'}?split=train") == documents
    with pytest.raises(DataError, match="cannot be read through the datasets library"):
        texts_of(f"hf://{tmp_path / 'set'}?split=nowhere")
    with pytest.raises(DataError, match="optionally"):
        texts_of(f"hf://{tmp_path / 'set'}?trust=yes")
    with pytest.raises(DataError, match="no column 'body', only text, title"):
        list(Corpus([f"hf://{tmp_path / 'set'}"], ["body"]))


def test_hugging_face_data_sets_are_split_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(reading, "CHUNK_BYTES", 1500)
    documents = [
        text
        for number in range(5)
        for text in write_corpus(tmp_path / "set" / f"train-{number}.jsonl", 40, seed=number)
    ]
    found = find_sources([f"hf://{tmp_path / 'set'}"])
    shards = [list(read_chunks(found, shard=InputShard(index, 3))) for index in range(3)]
    assert [row["text"] for shard in shards for chunk in shard for row in chunk.records] == documents
    assert all(len(shard) > 2 for shard in shards)
    for number in (0, len(shards[1]) - 1):
        after = shards[1][number].position
        assert list(read_chunks(found, shard=InputShard(1, 3), after=after)) == shards[1][number + 1 :]
    with pytest.raises(DataError, match=r"has 5 file\(s\), too few for 6 shards"):
        list(read_chunks(found, shard=InputShard(0, 6)))

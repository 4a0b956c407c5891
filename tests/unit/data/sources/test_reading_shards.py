"""Shards of any input are disjoint and complete, and an interrupted reading goes on with the very same chunks."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import zstandard

from ctxlm_ds.data.sources import lines, reading
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks, source_signature, total_bytes
from ctxlm_ds.data.sources.types import BadRecord, Chunk, InputShard, Position
from tests.text import write_corpus

SEEKABLE = ["text", "jsonl", "wikiextractor", "parquet"]
COMPRESSED = ["jsonl.gz", "jsonl.xz", "jsonl.bz2", "jsonl.zst", "text.gz", "wikiextractor.zst"]
EXTENSIONS = {"text": "txt", "wikiextractor": "wiki"}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 512)


def _name(number: int, format: str) -> str:
    kind, _, compressed = format.partition(".")
    return f"{number}.{EXTENSIONS.get(kind, kind)}" + (compressed and f".{compressed}")


def _found(folder: Path, formats: list[str], size: int = 130) -> tuple[list[reading.Source], list[str]]:
    documents: list[str] = []
    found = []
    for number, format in enumerate(formats):
        path = folder / _name(number, format)
        documents += write_corpus(path, size, seed=number, format=format)
        if format.endswith((".bz2", ".zst")):
            _rejoin(path, bz2 if format.endswith("bz2") else zstandard)
        wiki = format.startswith("wikiextractor")
        found += find_sources([str(path)], "wikiextractor" if wiki else "auto")
    return found, documents


def _rejoin(path: Path, library: Any) -> None:
    """Write a compressed file anew in small members: a member of either kind is otherwise a single block."""
    lines = library.decompress(path.read_bytes(), **({} if library is bz2 else {"max_output_size": 1 << 24}))
    parts = [lines[start : start + 4000] for start in range(0, len(lines), 4000)]
    path.write_bytes(b"".join(map(library.compress, parts)))


def _texts(chunks: list[Chunk]) -> list[str]:
    items = [item for chunk in chunks for item in parse_chunk(chunk, ["text"])]
    assert not [str(item) for item in items if isinstance(item, BadRecord)]
    return [item["text"] for item in items if isinstance(item, dict)]


@pytest.mark.parametrize("formats", [[format] for format in SEEKABLE + COMPRESSED] + [SEEKABLE + COMPRESSED])
def test_shards_one_after_another_are_the_whole(tmp_path: Path, formats: list[str]) -> None:
    found, documents = _found(tmp_path, formats)
    assert _texts(list(read_chunks(found))) == documents
    for count in (2, 3, 60):
        shards = [list(read_chunks(found, shard=InputShard(index, count))) for index in range(count)]
        assert [text for shard in shards for text in _texts(shard)] == documents
        assert sum(total_bytes(found, InputShard(index, count)) for index in range(count)) == total_bytes(found)
        if count < 4 and len(formats) == 1:
            sizes = [sum(map(len, _texts(shard))) for shard in shards]
            assert min(sizes) > max(sizes) / 3, sizes
        for index, shard in enumerate(shards):
            read = [chunk.bytes_read for chunk in shard]
            assert read == sorted(read) and max(read, default=0) <= total_bytes(found, InputShard(index, count))


@pytest.mark.parametrize("formats", [[format] for format in SEEKABLE + COMPRESSED] + [["jsonl", "text.gz", "parquet"]])
@pytest.mark.parametrize("shard", [InputShard(), InputShard(1, 3)])
def test_reading_goes_on_with_the_same_chunks(tmp_path: Path, formats: list[str], shard: InputShard) -> None:
    found, _ = _found(tmp_path, formats, 60)
    chunks = list(read_chunks(found, shard=shard))
    assert len(chunks) > 2
    for number, chunk in enumerate(chunks):
        after = Position(**json.loads(json.dumps(asdict(chunk.position))))
        assert list(read_chunks(found, shard=shard, after=after)) == chunks[number + 1 :]


@pytest.mark.parametrize("format", ["text", "jsonl", "wikiextractor", "lines:1", "lines:3", "file"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_any_lines_are_split_and_resumed_alike(
    tmp_path: Path, format: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 16)
    rng = random.Random(format)
    words = [b"\n", b"\n", b" \t\n", b"\r\n", b"x", b"y" * 70]
    words += [b"</doc>\n", b'<doc id="1" title="t">\n', b'{"text": "a b"}\n']
    path = tmp_path / f"corpus{suffix}"
    for _ in range(60):
        monkeypatch.setattr(reading, "CHUNK_BYTES", rng.choice([1, 7, 40]))
        content = b"".join(rng.choices(words, k=rng.randint(0, 60)))
        path.write_bytes(gzip.compress(content) if suffix else content)
        is_plain = format.startswith(("lines", "file"))
        found = find_sources([str(path)], "text" if is_plain else format, format if is_plain else "blank")
        whole = [_without_place(item) for chunk in read_chunks(found) for item in parse_chunk(chunk, ["text"])]
        count = rng.randint(2, 9)
        shards = [list(read_chunks(found, shard=InputShard(index, count))) for index in range(count)]
        items = [_without_place(item) for shard in shards for chunk in shard for item in parse_chunk(chunk, ["text"])]
        assert items == whole, content
        chunks = shards[rng.randrange(count)] or [chunk for shard in shards for chunk in shard]
        if chunks and chunks in shards:
            shard, number = InputShard(shards.index(chunks), count), rng.randrange(len(chunks))
            assert list(read_chunks(found, shard=shard, after=chunks[number].position)) == chunks[number + 1 :]


def _without_place(item: dict[str, str] | BadRecord) -> object:
    return (item.reason, item.excerpt) if isinstance(item, BadRecord) else item["text"]


def test_a_bad_record_of_a_shard_is_named_by_its_byte(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(2000)]
    lines[1500] = "broken"
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines))
    found = find_sources([str(path)])
    items = [item for chunk in read_chunks(found, shard=InputShard(1, 2)) for item in parse_chunk(chunk, ["text"])]
    bad = [item for item in items if isinstance(item, BadRecord)]
    assert [(item.unit, item.excerpt) for item in bad] == [("byte", b"broken")]
    assert path.read_bytes()[bad[0].position :].startswith(b"broken\n")


def test_the_signature_tells_other_sources(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"a" * 300_000)
    before = source_signature(find_sources([str(path)]))
    assert before == source_signature(find_sources([str(path)]))
    seen = {before, source_signature(find_sources([str(path)], "text")), source_signature([])}
    for content in (b"b" + b"a" * 299_999, b"a" * 299_999 + b"b", b"a" * 300_001):
        path.write_bytes(content)
        seen.add(source_signature(find_sources([str(path)])))
    seen |= {source_signature(find_sources([f"hf://some/name?revision={number}"])) for number in range(2)}
    assert len(seen) == 8

"""Damaged corpus files by the thousand: documents, bad records or a DataError, in bounded memory and time."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from ctxlm_ds.data.sources import lines, reading
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks, source_signature
from ctxlm_ds.data.sources.types import BadRecord, Chunk, InputShard
from ctxlm_ds.errors import DataError
from tests.fuzz import INSERTS, REPOSITORY, Case, damage, run_cases

pytestmark = pytest.mark.long

ROOM_BYTES = 256 << 20
TEXT = "Document {} has naïve words, 多语言 and “quotes”.\nIts second line."
TEXTS = [TEXT.format(number) * (1 + number % 5) for number in range(40)]
LONG_LINES = """
import resource, sys
from pathlib import Path
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks
from ctxlm_ds.data.sources.types import BadRecord
virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (virtual + 1_200_000_000,) * 2)
items = [item for chunk in read_chunks(find_sources(sys.argv[1:])) for item in parse_chunk(chunk, ["text"])]
print([str(item)[len(sys.argv[1]):] if isinstance(item, BadRecord) else len(item["text"]) for item in items])
"""


def _jsonl() -> bytes:
    return "".join(json.dumps({"title": "t", "text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def _wiki() -> bytes:
    return "".join(f'<doc id="1" url="u" title="T">\nT\n\n{text}\n\n</doc>\n' for text in TEXTS).encode()


def _table(write: Callable[[pyarrow.Table, io.BytesIO], None]) -> bytes:
    sink = io.BytesIO()
    coded = pyarrow.array([text[:20] for text in TEXTS]).dictionary_encode()
    write(pyarrow.table({"text": TEXTS, "title": coded}), sink)
    return sink.getvalue()


def _parquet(codec: str) -> bytes:
    options = {"row_group_size": 10, "compression": codec, "write_page_checksum": codec == "zstd"}
    return _table(lambda table, sink: parquet.write_table(table, sink, **options))


LINES = {"txt": "\n\n".join(TEXTS).encode(), "jsonl": _jsonl(), "wiki": _wiki()}
TABLES = {"snappy.parquet": _parquet("snappy"), "zstd.parquet": _parquet("zstd"), "none.parquet": _parquet("none")}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda content: gzip.compress(content, 1, mtime=0),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
PIECES = (
    *INSERTS, b"\xff\xfe", b"\0" * 50, b"\n" * 30, b"x" * 30_000, b"[" * 5_000, b"\r", b'"\\ud800"', b"</doc>\n",
    b'<doc id="', b"\x85", b"\x1f\x8b\x08", b"NaN",
)  # fmt: skip


def mutate(content: bytes, drawn: random.Random) -> bytes:
    """One to four changes."""
    for _ in range(drawn.choice([1, 1, 2, 4])):
        content = damage(content, drawn, PIECES)
    return content


def make_case(drawn: random.Random) -> tuple[str, bytes]:
    """(file name, content)."""
    name = drawn.choice([*LINES, *LINES, *TABLES])
    if name in TABLES:
        return name, mutate(TABLES[name], drawn)
    suffix = drawn.choice(list(COMPRESS))
    inner = mutate(LINES[name], drawn) if drawn.random() < 0.5 or not suffix else LINES[name]
    packed = COMPRESS[suffix](inner)
    return f"corpus.{name}{suffix}", mutate(packed, drawn) if suffix and drawn.random() < 0.7 else packed


def _items(chunks: list[Chunk]) -> list[dict[str, str] | BadRecord]:
    return [item for chunk in chunks for item in parse_chunk(chunk, ["text"])]


def _plain(items: list[dict[str, str] | BadRecord]) -> list[object]:
    return [(item.reason, item.excerpt) if isinstance(item, BadRecord) else item for item in items]


def check(path: Path, rng: random.Random) -> str:
    """Read one file in several ways, which must agree. Returns what came of it."""
    try:
        found = find_sources([str(path)], "wikiextractor" if ".wiki" in path.name else "auto")
        source_signature(found)
        chunks = list(read_chunks(found))
        items = _items(chunks)
        if chunks:
            number = rng.randrange(len(chunks))
            assert list(read_chunks(found, after=chunks[number].position)) == chunks[number + 1 :]
        count = rng.randint(2, 5)
        shards = [_items(list(read_chunks(found, shard=InputShard(index, count)))) for index in range(count)]
        assert _plain([item for shard in shards for item in shard]) == _plain(items)
    except DataError as error:
        assert str(path) in str(error)
        return "DataError"
    for item in items:
        if isinstance(item, BadRecord):
            assert item.position >= 0 and len(item.excerpt) <= 200 and str(item)
        else:
            item["text"].encode()
    if path.suffix == ".jsonl":
        assert [item["text"] for item in items if isinstance(item, dict)] == _expected(path.read_bytes())
    bad = sum(isinstance(item, BadRecord) for item in items)
    return "bad records" if bad else "documents"


def _expected(content: bytes) -> list[str]:
    """The texts of the lines that are documents, the plainest way."""
    texts = []
    for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        try:
            value = json.loads(line.decode()) if len(line) <= lines.MAX_RECORD_BYTES else 0
            text = value["text"] if isinstance(value, dict) else 0
        except (ValueError, KeyError, RecursionError):
            continue
        if text is None or (isinstance(text, str) and not (text.strip("\0 \t\r\n") == "" and "\0" in text)):
            texts.append((text or "").encode("utf-8", "replace").decode())
    return texts


def prepare(folder: Path) -> Case:
    reading.CHUNK_BYTES = 2_000
    lines.MAX_TEXT_DOCUMENT_BYTES = 8_000
    lines.MAX_RECORD_BYTES = 20_000
    lines.BLOCK_BYTES = 300

    def case(seed: int) -> str:
        drawn = random.Random(seed)
        name, content = make_case(drawn)
        (folder / name).write_bytes(content)
        outcome = check(folder / name, drawn)
        (folder / name).unlink()
        return outcome

    return case


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "seeds", [range(1000), pytest.param(range(1000, 42_500), marks=pytest.mark.soak)], ids=["some", "many"]
)
def test_mutated_files(tmp_path: Path, seeds: range) -> None:
    outcomes = run_cases(prepare, tmp_path, seeds, room_bytes=ROOM_BYTES)
    assert min(outcomes["documents"], outcomes["bad records"]) > len(seeds) / 10, outcomes


@pytest.mark.soak
def test_a_line_of_100_mb_is_read_and_one_of_600_mb_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "first"}\n{"text": "' + b"a" * 100_000_000 + b'"}\n{"text": "')
        for _ in range(600):
            file.write(b"b" * 1_000_000)
        file.write(b'"}\n{"text": "last"}\n')
    command = [sys.executable, "-c", LONG_LINES, str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True).stdout
    assert printed == "[5, 100000000, ', line 3: longer than 256,000,000 bytes', 4]\n"

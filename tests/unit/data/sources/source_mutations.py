"""Mutated corpus files through the reader, in a process of bounded memory: run by test_reading_fuzz.py.

`python source_mutations.py FOLDER SEED NUM_CASES` ends with status 0 where every file gave documents, bad records or a
DataError; the file of the case in hand lies in FOLDER.
"""

from __future__ import annotations

import bz2
import collections
import gzip
import io
import json
import lzma
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import zstandard
from pyarrow import parquet

from ctxlm_ds.data.sources import compression, lines, reading
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks, source_signature
from ctxlm_ds.data.sources.types import BadRecord, Chunk, InputShard
from ctxlm_ds.errors import DataError

ROOM_BYTES = 1 << 30
CASE_LIMIT_S = 20
TEXT = "Document {} has naïve words, 多语言 and “quotes”.\nIts second line."
TEXTS = [TEXT.format(number) * (1 + number % 5) for number in range(40)]


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
EXTREMES = [bytes(8), b"\xff" * 8, b"\xff" * 3, b"\xff\xff\xff\x7f", b"\x80" + bytes(7), bytes(7) + b"\x40"]
INSERTS = [
    b"\xff\xfe",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\0" * 50,
    b"\n" * 30,
    b"x" * 30_000,
    b"[" * 5_000,
    b"9" * 6_000,
    b"\r",
    b'"\\ud800"',
    b"</doc>\n",
    b'<doc id="',
    b"{",
    b"\xef\xbb\xbf",
    b"\x85",
    b"\x1f\x8b\x08",
    b"NaN",
]


def mutate(rng: random.Random, content: bytes) -> bytes:
    """One to four changes."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        place = rng.randint(0, len(content))
        kind = rng.randrange(8)
        if kind == 0:
            content = content[:place]
        elif kind in (1, 2) and content:
            flipped = bytearray(content)
            for _ in range(rng.choice([1, 1, 3, 30])):
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            content = bytes(flipped)
        elif kind == 3:
            extreme = rng.choice(EXTREMES)
            content = content[:place] + extreme + content[place + len(extreme) :]
        elif kind == 4:
            content = content[:place] + rng.choice(INSERTS) + content[place:]
        elif kind == 5:
            content = content[:place] + content[place + rng.randint(1, 400) :]
        elif kind == 6:
            content = content + content[place : place + 500]
        elif rng.random() < 0.2:
            content = rng.choice([b"", b"\n", b"\0", b"\0" * 70_000, b"\n" * 5_000, rng.randbytes(600)])
    return content


def make_case(rng: random.Random) -> tuple[str, bytes]:
    """(file name, content)."""
    name = rng.choice([*LINES, *LINES, *TABLES])
    if name in TABLES:
        return name, mutate(rng, TABLES[name])
    suffix = rng.choice(list(COMPRESS))
    inner = mutate(rng, LINES[name]) if rng.random() < 0.5 or not suffix else LINES[name]
    packed = COMPRESS[suffix](inner)
    return f"corpus.{name}{suffix}", mutate(rng, packed) if suffix and rng.random() < 0.7 else packed


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


def main() -> None:
    folder, seed, num_cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    reading.CHUNK_BYTES = 2_000
    lines.MAX_TEXT_DOCUMENT_BYTES = 8_000
    lines.MAX_RECORD_BYTES = 20_000
    compression.BLOCK_BYTES = 300
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + ROOM_BYTES, virtual + ROOM_BYTES))
    rng = random.Random(seed)
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(num_cases):
        name, content = make_case(rng)
        path = folder / name
        path.write_bytes(content)
        signal.alarm(CASE_LIMIT_S)  # a hang ends with SIGALRM, the case's file still there
        outcomes[check(path, rng)] += 1
        signal.alarm(0)
        path.unlink()
    print(json.dumps({"outcomes": outcomes, "peak_bytes": _peak_bytes()}))


def _peak_bytes() -> int:
    """Most memory this program held; getrusage would go on from what the process that started it held."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


if __name__ == "__main__":
    main()

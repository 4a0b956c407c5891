"""Read corpus files of any format as chunks of raw records: any shard of the input, from any position.

Inputs are files (text, jsonl, WikiExtractor output, parquet; lines also compressed), globs, and Hugging Face data sets
(`hf://NAME`, streamed; their code is never run). A chunk has about a megabyte, so memory does not grow with the corpus.
Shards: the files, one after another, have T bytes on disk; shard i of n has the bytes [T*i/n, T*(i+1)/n). parsing.py
makes documents of chunks, in worker processes.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ctxlm_ds.atomic import PARTIAL_MARK
from ctxlm_ds.data.sources.lines import Decompressor, compression_of, read_lines
from ctxlm_ds.data.sources.tables import HF_SCHEME, read_hf, read_table
from ctxlm_ds.data.sources.types import INPUT_FORMATS, WHOLE_INPUT, Chunk, InputShard, Position, Source, text_format
from ctxlm_ds.errors import DataError

CHUNK_BYTES = 1 << 20

_EXTENSIONS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_NOT_READ = (".tar", ".tgz", ".zip", ".7z", ".rar", ".lz4", ".z", ".pdf", ".docx", ".arrow", ".feather")
_WIKIEXTRACTOR_NAME = re.compile(r"wiki_\d+")
_SIGNATURE_BYTES = 1 << 16


def find_sources(inputs: Sequence[str], input_format: str = "auto", document: str = "blank") -> list[Source]:
    """Return the sources that `inputs` name: paths, sorted globs and hf://NAME; `document` is one of plain text.

    A file named twice is taken once. Raises DataError for a missing file, a glob without a match, a folder, or
    an unknown format or document.
    """
    if input_format not in INPUT_FORMATS:
        raise DataError(f"input format {input_format!r} is not known; choose one of {', '.join(INPUT_FORMATS)}")
    sources: dict[str, Source] = {}
    plain = text_format(document)
    for name in inputs:
        if name.startswith(HF_SCHEME):
            sources.setdefault(name, Source(name, "hf", "", 0))
            continue
        for path in _expand(name):
            source = _file_source(path, input_format)
            source = replace(source, format=plain) if source.format == "text" else source
            sources.setdefault(os.path.realpath(path), source)
    if not sources:
        raise DataError("no input; name at least one file, glob or hf://NAME")
    if plain != "text" and all(source.format != plain for source in sources.values()):
        raise DataError(f"--document {document}: no input is plain text, so it has no effect; leave it out")
    return list(sources.values())


def _expand(name: str) -> list[str]:
    name = os.path.expanduser(name)
    if os.path.isdir(name):
        raise DataError(f"{name} is a folder; name its files, for example '{os.path.join(name, '*.jsonl')}'")
    if os.path.exists(name) or not glob.has_magic(name):
        return [name]
    found = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
    paths = [path for path in found if not _is_unfinished(path)]
    if not paths:
        raise DataError(f"{name}: no file matches; check the pattern (quote it, so that the shell leaves it alone)")
    return paths


def _is_unfinished(path: str) -> bool:
    """Return whether a file is in a folder that a tool is writing, or that a killed one left."""
    return PARTIAL_MARK in os.path.basename(os.path.dirname(os.path.abspath(path)))


def _file_source(path: str, input_format: str) -> Source:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise DataError(f"{path}: no such file; check its name") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file (reading cannot resume inside a pipe); write it to a file first")
    if _is_unfinished(path):
        raise DataError(f"{path}: in a folder that was never finished; make it again, or copy the file elsewhere")
    compression = compression_of(path)
    stem = path[: -len(compression) - 1] if compression else path
    if stem.lower().endswith(_NOT_READ):
        kinds = "archives, documents and Arrow files"
        raise DataError(f"{path}: {kinds} are not read; unpack it or convert it to text, jsonl or parquet first")
    chosen = _guess_format(path, stem, compression) if input_format == "auto" else input_format
    if chosen == "parquet" and compression:
        raise DataError(f"{path}: a {chosen} file cannot be read compressed; decompress it first")
    return Source(path, chosen, compression, status.st_size)


def _guess_format(path: str, stem: str, compression: str) -> str:
    name = os.path.basename(stem)
    if _WIKIEXTRACTOR_NAME.fullmatch(name):
        with open(path, "rb") as raw:  # WikiExtractor gives its JSON form the same name
            stream = Decompressor(raw, compression) if compression else raw
            return "jsonl" if (stream.read(1) or b"") == b"{" else "wikiextractor"
    return _EXTENSIONS.get(os.path.splitext(name)[1].lower(), "text")


def total_bytes(sources: Iterable[Source], shard: InputShard = WHOLE_INPUT) -> int:
    """Return the size on disk of all sources, or of a shard of them."""
    return len(_shard_span(sources, shard))


def _shard_span(sources: Iterable[Source], shard: InputShard) -> range:
    num_bytes = sum(source.num_bytes for source in sources)
    return range(num_bytes * shard.index // shard.count, num_bytes * (shard.index + 1) // shard.count)


def read_chunks(
    sources: Sequence[Source],
    json_keys: Sequence[str] = ("text",),
    shard: InputShard = WHOLE_INPUT,
    after: Position | None = None,
) -> Iterator[Chunk]:
    """Yield all records of a shard of the sources in chunks.

    All shards, one after another, give the complete input in order (of hf:// each shard has a share). Equal arguments
    give equal chunks. `after` is the position behind the last chunk that was read. Raises DataError if a file cannot be
    read.
    """
    after = after or Position()
    ours = _shard_span(sources, shard)
    end = 0
    for number, source in enumerate(sources):
        begin, end = end, end + source.num_bytes
        if number < after.source:
            continue
        inside = after if number == after.source and after != Position(number) else None
        span = _local(ours, begin, end, is_last_shard=shard.index + 1 == shard.count)
        if source.format == "hf":
            chunks = read_hf(source, json_keys, shard, CHUNK_BYTES, inside)
        elif not span:
            continue
        elif source.format == "parquet":
            chunks = read_table(source, json_keys, span, CHUNK_BYTES, inside)
        else:
            chunks = read_lines(source, span, CHUNK_BYTES, inside)
        # The chunk behind is read first, so that a finished file is not opened again to find its end.
        for chunk, following in itertools.pairwise(itertools.chain(chunks, (None,))):
            assert chunk is not None
            is_last = following is None
            bytes_read = end if is_last else min(begin + chunk.bytes_read, end)
            position = Position(number + 1) if is_last else replace(chunk.position, source=number)
            yield replace(chunk, bytes_read=min(max(bytes_read, ours.start), ours.stop) - ours.start, position=position)


def _local(ours: range, begin: int, end: int, is_last_shard: bool) -> range:
    """Return the part of the shard `ours` within the file at [begin, end), in the file's bytes.

    An empty file, which may be a damaged one, belongs to the shard that owns its position, at the end to the last.
    """
    if begin == end:
        return range(int(begin in ours or (is_last_shard and begin == ours.stop)))
    return range(max(0, min(ours.start, end) - begin), max(0, min(ours.stop, end) - begin))


def check_keys(sources: Iterable[Source], json_keys: Sequence[str], flags: str = "--json-keys") -> None:
    """Raise DataError if a key is named twice, or several for a format that has one text per document."""
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise DataError(f"{flags} {' '.join(json_keys)}: name each key once")
    for source in sources:
        if source.format.startswith(("text", "lines:", "file")) and len(json_keys) > 1:
            raise DataError(f"{source.path}: plain text has one text per document, {flags} name {len(json_keys)}")


def source_signature(sources: Iterable[Source]) -> str:
    """Return a sha256 (hex) over each source's name, format and size and its first and last 64 KiB.

    Of a data set from the Hub it covers the hf:// address only (name a revision to pin it). Raises the disk's OSError.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(json.dumps([source.name, source.format, source.compression, source.num_bytes]).encode())
        if source.format != "hf":
            with open(source.path, "rb") as file:
                digest.update(file.read(_SIGNATURE_BYTES))
                file.seek(max(0, source.num_bytes - _SIGNATURE_BYTES))
                digest.update(file.read(_SIGNATURE_BYTES))
    return digest.hexdigest()

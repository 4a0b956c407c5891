"""Make documents of chunks of raw records, in worker processes. Texts have no lone surrogates."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from ctxlm_ds.data.sources.lines import DOC_END
from ctxlm_ds.data.sources.types import (
    EXCERPT_BYTES,
    KEY_HINT,
    MAX_RECORD_BYTES,
    NOT_UTF8,
    BadRecord,
    Chunk,
    Document,
    SpannedDocument,
    Spans,
)

_BOM = b"\xef\xbb\xbf"
_DOC_START = b"<doc "
_ATTRIBUTE = re.compile(r'\b(\w+)="(.*?)"(?=\s+\w+="|\s*>\s*$)')
_JSON_TYPES = {bool: "true or false", str: "a string", list: "a list", dict: "an object", type(None): "null"}
_JSON_TYPES |= {int: "a number", float: "a number"}


class _Unfit(Exception):
    """A record is no document: (reason, detail)."""


def parse_chunk(chunk: Chunk, json_keys: Sequence[str], spans_key: str = "") -> Iterator[Document | BadRecord]:
    """Yield the document of each record (with `spans_key` a SpannedDocument), or the reason against it, in order."""
    records, to_document = _FORMATS[chunk.format.partition(":")[0]]
    if spans_key:
        to_document = partial(_from_spanned_json, spans_key=spans_key)
    for place, record in records(chunk):
        try:
            yield to_document(record, json_keys)
        except _Unfit as error:
            reason, detail = error.args
            position, unit = _position(chunk, place)
            yield BadRecord(chunk.path, position, unit, reason, _excerpt(record, json_keys), detail)
    yield from chunk.bad_records


def _position(chunk: Chunk, place: int) -> tuple[int, str]:
    """Return the number of a row, or of the line that begins at byte `place` of the chunk, and its unit."""
    if isinstance(chunk.records, list):
        return chunk.first + place, "row"
    if chunk.first == 0:
        return chunk.offset + place, "byte"
    return chunk.first + chunk.records.count(b"\n", 0, place), "line"


def _excerpt(record: Any, json_keys: Sequence[str]) -> bytes:
    """Return the beginning of a line, or of a row's first text."""
    if isinstance(record, dict):
        record = next((record[key] for key in json_keys if isinstance(record.get(key), str | bytes)), b"")
    if isinstance(record, str):
        record = record[:EXCERPT_BYTES].encode("utf-8", "replace")
    return bytes(record[:EXCERPT_BYTES])


def _lines(chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """Yield byte in the chunk and line without its end; a byte order mark at the start of the file is skipped."""
    assert isinstance(chunk.records, bytes)
    place = 0
    for line in chunk.records.split(b"\n"):
        yield place, line.removeprefix(_BOM) if place == chunk.offset == 0 else line
        place += len(line) + 1


def _grouped_lines(chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """Yield the documents between blank lines, or WikiExtractor's between `<doc>`, `</doc>` and ends of the chunk."""
    is_wiki = chunk.format == "wikiextractor"
    lines: list[bytes] = []
    first = 0
    for place, line in _lines(chunk):
        is_blank = not line.strip()
        if lines and (line.startswith(_DOC_START) if is_wiki else is_blank):
            yield first, b"\n".join(lines)  # of WikiExtractor's one that was not closed
            lines = []
        if is_wiki and line.startswith(DOC_END):
            yield (first if lines else place), b"\n".join([*lines, DOC_END])
            lines = []
        elif lines or not is_blank:
            first = first if lines else place
            lines.append(line)
    if lines:
        yield first, b"\n".join(lines)


def _counted_lines(chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """Yield the documents of `lines:N`, or the one of a `file`."""
    lines = list(_lines(chunk))
    size = int(chunk.format.partition(":")[2] or len(lines))
    for first in range(0, len(lines), size):
        record = b"\n".join(line for _, line in lines[first : first + size])
        if record.strip():
            yield lines[first][0], record


def _decoded(record: bytes) -> str:
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        line = record.count(b"\n", 0, error.start)
        place = f"{error.start}, in its line {line + 1}" if line else str(error.start)
        raise _Unfit(NOT_UTF8, f"byte 0x{record[error.start]:02x} at {place}") from None


def _from_text(record: bytes, json_keys: Sequence[str]) -> Document:
    return dict.fromkeys(json_keys, _checked(_decoded(record).strip("\r\n")))


def _from_json(record: bytes, json_keys: Sequence[str]) -> Document:
    return _fields(_json_object(record, json_keys), json_keys)


def _from_spanned_json(record: bytes, json_keys: Sequence[str], spans_key: str) -> Document:
    value = _json_object(record, json_keys)
    document = _fields(value, json_keys)
    if spans_key not in value:
        raise _Unfit(f"has no key {spans_key!r}", f"its keys: {_keys_of(value)}; see --spans-key")
    return SpannedDocument(document, _spans(value[spans_key], document[json_keys[0]], spans_key))


def _spans(value: Any, text: str, key: str) -> Spans:
    """Return the spans of a text without white space around them."""
    found = []
    if value is not None and not isinstance(value, list):
        raise _Unfit(f"{key!r} is not a list of [first, after the last]", str(value)[:60])
    for pair in value or []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(place) is int for place in pair)):
            raise _Unfit(f"{key!r} is not a list of [first, after the last]", f"{str(pair)[:60]}")
        begin, end = pair
        if not 0 <= begin < end <= len(text):
            raise _Unfit(f"{key!r} has a span outside of the text", f"{pair}, the text has {len(text)} characters")
        span = text[begin:end]
        if span.isspace():
            raise _Unfit(f"{key!r} has a span of white space", f"{pair}")
        found.append((end - len(span.lstrip()), begin + len(span.rstrip())))
    found.sort()
    for (_, end), (begin, _) in pairwise(found):
        if begin < end:
            raise _Unfit(f"{key!r} has spans that overlap", f"one begins at {begin}, the one before it ends at {end}")
    return found


def _json_object(record: bytes, json_keys: Sequence[str]) -> dict[str, Any]:
    text = _decoded(record)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if not text.strip("\0 \t\r\n"):
            raise _Unfit("nothing but NUL bytes", "") from None
        raise _Unfit("not valid JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}") from None
    except RecursionError:
        raise _Unfit("not valid JSON", "nested too deeply") from None
    except ValueError:
        raise _Unfit("not valid JSON", "a number of thousands of digits") from None
    if not isinstance(value, dict):
        raise _Unfit("not a JSON object", f"{_JSON_TYPES[type(value)]}, an object with {json_keys[0]!r} is expected")
    return value


def _from_wikiextractor(record: bytes, json_keys: Sequence[str]) -> Document:
    """Return the text without its title line, as in WikiExtractor's JSON, and without its escapes (--html-safe)."""
    head, _, body = _decoded(record).partition("\n")
    if not head.startswith("<doc "):
        raise _Unfit("outside of <doc> ... </doc>", "")
    if not body.endswith("</doc>"):
        raise _Unfit("no </doc> at the end", "")
    fields: dict[str, Any] = {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(head.rstrip())}
    body = body.removesuffix("</doc>")
    first, _, rest = body.partition("\n")
    if html.unescape(first.strip()) == fields.get("title", "").strip():
        body = rest
    for escaped, character in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        body = body.replace(escaped, character)
    return _fields(fields | {"text": body.strip("\r\n")}, json_keys)


def _fields(record: dict[Any, Any], json_keys: Sequence[str]) -> Document:
    document = {}
    for key in json_keys:
        if key not in record:
            raise _Unfit(f"has no key {key!r}", f"its keys: {_keys_of(record)}{KEY_HINT}")
        text = record[key]
        if text is None:
            text = ""
        elif isinstance(text, bytes):
            # Strings of tables are bytes, so that invalid UTF-8 costs one row only.
            if len(text) > MAX_RECORD_BYTES:
                raise _Unfit(f"longer than {MAX_RECORD_BYTES:,} bytes", "")
            text = _decoded(text)
        elif not isinstance(text, str):
            what = _JSON_TYPES.get(type(text), f"of type {type(text).__name__}")
            raise _Unfit(f"the value of {key!r} is not text", what)
        document[key] = _checked(text)
    return document


def _keys_of(record: dict[Any, Any]) -> str:
    return ", ".join(sorted(map(str, record)))[:200] or "none"


def _checked(text: str) -> str:
    """Return the text with `?` for lone surrogates, which JSON can write."""
    if text.lstrip()[:1] == "\0" and not text.strip("\0 \t\r\n"):
        raise _Unfit("nothing but NUL bytes", "")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return text.encode("utf-8", "replace").decode()
    return text


_FORMATS: dict[str, tuple[Callable[[Chunk], Iterator[tuple[int, Any]]], Callable[[Any, Sequence[str]], Document]]] = {
    "text": (_grouped_lines, _from_text),
    **dict.fromkeys(("lines", "file"), (_counted_lines, _from_text)),
    "jsonl": (lambda chunk: ((place, line) for place, line in _lines(chunk) if line.strip()), _from_json),
    "wikiextractor": (_grouped_lines, _from_wikiextractor),
    **dict.fromkeys(("parquet", "hf"), (lambda chunk: enumerate(chunk.records), _fields)),
}
"""Functions that find the records of each format and make documents of them."""

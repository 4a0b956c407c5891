"""Iterate over a corpus as documents or texts, as often as needed; count its bad records by reason, up to a limit."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ctxlm_ds.console import byte_progress, logger
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import check_keys, find_sources, read_chunks, total_bytes
from ctxlm_ds.data.sources.types import KEY_HINT, NOT_UTF8, BadRecord, Document
from ctxlm_ds.errors import DataError
from ctxlm_ds.untrusted_json import one_value_remedy

MAX_KEPT = 1000
_MAX_LOGGED = 10
_COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def remedy(bad: BadRecord) -> str:
    """Return how a file of another encoding, or of one JSON value, is converted; nothing for other bad records."""
    if "JSON" in bad.reason and (bad.position, bad.unit) == (1, "line"):
        return one_value_remedy(bad.excerpt.decode("utf-8", "replace"), shlex.quote(bad.path))
    if bad.reason != NOT_UTF8 or bad.unit != "line":
        return ""
    file = "FILE, unpacked" if bad.path.endswith(_COMPRESSED) else shlex.quote(bad.path)
    found, encoding = "if its encoding is another (`file -bi` tries to find it)", "ENCODING"
    if bad.position == 1 and bad.excerpt.startswith(_UTF16_MARKS):
        found, encoding = "the file is UTF-16", "UTF-16"
    # Windows has quotes and dashes where ISO-8859 has control characters; other scripts have letters there.
    elif re.match("byte 0x(85|9[1-7])", bad.detail) and not re.search(rb"[\x80-\xff]{3}", bad.excerpt):
        found, encoding = "its encoding is probably WINDOWS-1252", "WINDOWS-1252"
    return f"{found}: convert it, iconv -f {encoding} -t UTF-8 {file} > NEW"


class BadRecords:
    """Skipped records, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reasons: Counter[str] = Counter()
        self._kept: list[dict[str, Any]] = []

    @property
    def count(self) -> int:
        return self.reasons.total()

    def add(self, bad: BadRecord, num_records: int) -> None:
        """Count one, found among `num_records` so far. Raises DataError if it is one too many."""
        self.reasons[bad.reason] += 1
        if self.count > self.limit:
            if not self.limit:
                fix = remedy(bad)
                if fix and bad.reason != NOT_UTF8:  # every record would be skipped
                    raise DataError(f"{bad}; {fix}")
                raise DataError(f"{bad}; {fix or 'fix it'}, or skip such records with --max-bad-records N")
            by_reason = ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.most_common())
            raise DataError(
                f"{bad}; {self.count:,} of {num_records:,} records are no documents ({by_reason}), "
                f"more than the {self.limit} allowed; {remedy(bad) or 'fix them'}, or raise --max-bad-records"
            )
        if self.count <= _MAX_LOGGED:
            more = "; further ones are only counted" if self.count == _MAX_LOGGED else ""
            logger.warning("skipped: %s%s", bad, more)
        if self.count <= MAX_KEPT:
            self._kept.append(
                {
                    "path": bad.path.encode("utf-8", "replace").decode("utf-8"),
                    "position": bad.position,
                    "unit": bad.unit,
                    "reason": bad.reason,
                    "detail": bad.detail.encode("utf-8", "replace").decode("utf-8"),
                    "excerpt": bad.excerpt.decode("utf-8", "replace"),
                }
            )

    def all_unreadable(self, num_records: int) -> str:
        """Return a sentence if none of the records that were read is a document, else nothing."""
        if not self.count or self.count < num_records:
            return ""
        which = f"all {num_records:,} records were" if num_records > 1 else "the only record was"
        return f"{which} unreadable ({', '.join(f'{count:,} {reason}' for reason, count in self.reasons.items())})"

    def error_lines(self) -> str:
        """Return the content of the error file: a JSON object per line; empty for none."""
        return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in self._kept)

    def to_json(self) -> dict[str, Any]:
        """Return the state that `restore` loads."""
        return {"reasons": dict(self.reasons), "kept": self._kept}

    def restore(self, value: dict[str, Any]) -> None:
        """Load the output of `to_json`."""
        self.reasons = Counter(value["reasons"])
        self._kept = value.get("kept", [])


class Corpus:
    """Every document of some inputs (see reading.py), in order; each iteration is one pass.

    `key_flags` are the flags by which the user named the keys, for messages. Raises DataError if an input is missing,
    and while iterating if more than `max_bad_records` records are no documents.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        json_keys: Sequence[str] = ("text",),
        input_format: str = "auto",
        max_bad_records: int = 0,
        key_flags: str = "--json-keys",
        document: str = "blank",
    ) -> None:
        self.sources = find_sources(inputs, input_format, document)
        self.json_keys = tuple(json_keys)
        self.max_bad_records = max_bad_records
        self._key_flags = key_flags
        check_keys(self.sources, self.json_keys, key_flags)

    def __iter__(self) -> Iterator[str]:
        for document in self.documents():
            yield from document.values()

    def documents(self) -> Iterator[Document]:
        """Yield every document: its texts by key."""
        bad_records, num_records = BadRecords(self.max_bad_records), 0
        try:
            with byte_progress("read", total_bytes(self.sources)) as progress:
                for chunk in read_chunks(self.sources, self.json_keys):
                    for document in parse_chunk(chunk, self.json_keys):
                        num_records += 1
                        if isinstance(document, BadRecord):
                            bad_records.add(document, num_records)
                        else:
                            yield document
                    progress.update(chunk.bytes_read)
        except DataError as error:
            raise DataError(str(error).replace(KEY_HINT, f"; see {self._key_flags}")) from error
        if unreadable := bad_records.all_unreadable(num_records):
            raise DataError(f"the input holds no text: {unreadable}")
        if bad_records.count:
            logger.warning("%d records were no documents and were skipped", bad_records.count)

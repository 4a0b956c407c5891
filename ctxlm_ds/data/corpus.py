"""A corpus as documents or texts, iterated as often as needed, with progress."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from ctxlm_ds.console import byte_progress
from ctxlm_ds.data.sources import (
    BadRecord,
    Document,
    check_keys,
    find_sources,
    parse_chunk,
    read_chunks,
    total_bytes,
)
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

_NAMED_BAD_RECORDS = 10


class Corpus:
    """Every document of some inputs (see sources.py), one pass an iteration, in order.

    Raises DataError at once where an input is missing, while iterating where more than `max_bad_records` records are
    no documents; those within the limit are left out, the first ten by name.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        json_keys: Sequence[str] = ("text",),
        input_format: str = "auto",
        max_bad_records: int = 0,
    ) -> None:
        self.sources = find_sources(inputs, input_format)
        self.json_keys = tuple(json_keys)
        self.max_bad_records = max_bad_records
        check_keys(self.sources, self.json_keys)

    def __iter__(self) -> Iterator[str]:
        """Every text of every document."""
        for document in self.documents():
            yield from document.values()

    def documents(self) -> Iterator[Document]:
        """Every document: its texts by key."""
        num_bad = 0
        with byte_progress("read", total_bytes(self.sources)) as progress:
            for chunk in read_chunks(self.sources, self.json_keys):
                for document in parse_chunk(chunk, self.json_keys):
                    if isinstance(document, BadRecord):
                        num_bad += 1
                        self._refuse(document, num_bad)
                    else:
                        yield document
                progress.update(chunk.bytes_read)
        if num_bad:
            logger.warning("%d records were no documents and were left out", num_bad)

    def _refuse(self, bad: BadRecord, num_bad: int) -> None:
        if num_bad > self.max_bad_records:
            beyond = f" (more than the {self.max_bad_records} allowed)" if self.max_bad_records else ""
            raise DataError(f"{bad}; mend it, or let such records be skipped with --max-bad-records N{beyond}")
        if num_bad <= _NAMED_BAD_RECORDS:
            logger.warning("skipped: %s", bad)

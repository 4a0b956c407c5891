"""Iterate over a corpus as documents or texts, as often as needed, with progress."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from ctxlm_ds.console import byte_progress
from ctxlm_ds.data.sources.bad_records import BadRecords
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import check_keys, find_sources, read_chunks, total_bytes
from ctxlm_ds.data.sources.types import KEY_HINT, BadRecord, Document
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")


class Corpus:
    """Every document of some inputs (see reading.py), in order; each iteration is one pass.

    Args:
        inputs: files, globs and `hf://` names.
        json_keys: keys or columns to take.
        input_format: `auto` or a format.
        max_bad_records: how many records that are no documents are skipped; the first ten are logged.
        key_flags: the flags by which the user named the keys.

    Raises:
        DataError: an input is missing; while iterating, too many records are no documents.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        json_keys: Sequence[str] = ("text",),
        input_format: str = "auto",
        max_bad_records: int = 0,
        key_flags: str = "--json-keys",
    ) -> None:
        self.sources = find_sources(inputs, input_format)
        self.json_keys = tuple(json_keys)
        self.max_bad_records = max_bad_records
        self._key_flags = key_flags
        check_keys(self.sources, self.json_keys, key_flags)

    def __iter__(self) -> Iterator[str]:
        """Yield every text of every document."""
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

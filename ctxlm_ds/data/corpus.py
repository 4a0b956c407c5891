"""A corpus as texts, iterated as often as needed, with progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctxlm_ds.console import byte_progress
from ctxlm_ds.data.sources import BadRecord, check_keys, find_sources, parse_chunk, read_chunks, total_bytes
from ctxlm_ds.errors import DataError


class Corpus:
    """Every text of every document of some inputs (see sources.py), one pass an iteration.

    Raises DataError at once where an input is missing, while iterating where a record is no document.
    """

    def __init__(self, inputs: Sequence[str], json_keys: Sequence[str] = ("text",), input_format: str = "auto") -> None:
        self.sources = find_sources(inputs, input_format)
        self.json_keys = tuple(json_keys)
        check_keys(self.sources, self.json_keys)

    def __iter__(self) -> Iterator[str]:
        with byte_progress("read", total_bytes(self.sources)) as progress:
            for chunk in read_chunks(self.sources, self.json_keys):
                for document in parse_chunk(chunk, self.json_keys):
                    if isinstance(document, BadRecord):
                        raise DataError(f"{document}; mend or remove it")
                    yield from document.values()
                progress.update(chunk.bytes_read)

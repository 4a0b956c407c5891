"""Keyed samples of huge corpora, drawn in one pass: (seed, document number) alone decide which documents are in one."""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence

_IN_MEMORY_BYTES = 32 << 20
logger = logging.getLogger("ctxlm_ds")


class KeyedSample:
    """The added documents with the smallest keys that fit into `max_bytes` (at least one), in their order.

    Every document has the same chance. Memory: about 100 bytes per document kept; the texts are in a
    temporary file of at most max_bytes * (1 + ln(corpus / max_bytes)).
    """

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        self.num_seen = 0
        self.bytes_seen = 0
        self.bytes_kept = 0
        self._max_bytes = max_bytes
        self._seed = seed
        self._limit: int | None = None
        self._kept: list[tuple[int, int, int]] = []
        """Heap of (-key, offset, length in the spool)."""
        self._spool = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 (as long as the object)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, fields: Sequence[str]) -> None:
        """Add the next document: one or several texts."""
        key = int.from_bytes(hashlib.blake2b(f"{self._seed}:{self.num_seen}".encode(), digest_size=8).digest(), "big")
        self.num_seen += 1
        record = json.dumps(list(fields)).encode()
        self.bytes_seen += len(record)
        if self._limit is not None and key >= self._limit:
            return
        heapq.heappush(self._kept, (-key, self._spool.tell(), len(record)))
        self._spool.write(record)
        self.bytes_kept += len(record)
        while self.bytes_kept > self._max_bytes and len(self._kept) > 1:
            dropped, _, length = heapq.heappop(self._kept)
            self._limit = -dropped
            self.bytes_kept -= length

    def __iter__(self) -> Iterator[list[str]]:
        end = self._spool.tell()
        for _, offset, length in sorted(self._kept, key=lambda entry: entry[1]):
            self._spool.seek(offset)
            yield json.loads(self._spool.read(length))
        self._spool.seek(end)


def sampled_texts(texts: Iterable[str], max_bytes: int, seed: int = 0) -> Iterator[str]:
    """Yield the texts of a KeyedSample, after all have been read."""
    sample = KeyedSample(max_bytes, seed)
    for text in texts:
        sample.add([text])
    logger.info(
        "sample: %d of %d documents, %.1f of %.1f MB",
        len(sample), sample.num_seen, sample.bytes_kept / 1e6, sample.bytes_seen / 1e6,
    )  # fmt: skip
    for (text,) in sample:
        yield text

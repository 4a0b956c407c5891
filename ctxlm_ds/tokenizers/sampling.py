"""A sample of a corpus in one pass: which documents are in it depends on (seed, document number) alone."""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence

logger = logging.getLogger("ctxlm_ds")

_IN_MEMORY_BYTES = 32 << 20


class KeyedSample:
    """Of all documents added, those with the smallest keys that fit into `max_bytes` (one at least), in their order.

    Every document has the same chance, wherever it stands. Memory: about 100 bytes a document kept; the texts lie in a
    temporary file of at most max_bytes * (1 + ln(corpus / max_bytes)).
    """

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        self.max_bytes = max_bytes
        self.seed = seed
        self.num_seen = 0
        self.bytes_seen = 0
        self.bytes_kept = 0
        self._limit: int | None = None
        self._kept: list[tuple[int, int, int]] = []
        """Heap of (-key, offset, length in the spool)."""
        self._spool = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 (as long as the object)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def add(self, fields: Sequence[str]) -> None:
        """Offer the next document: one or several texts."""
        key = int.from_bytes(hashlib.blake2b(f"{self.seed}:{self.num_seen}".encode(), digest_size=8).digest(), "big")
        self.num_seen += 1
        record = json.dumps(list(fields)).encode()
        self.bytes_seen += len(record)
        if self._limit is not None and key >= self._limit:
            return
        heapq.heappush(self._kept, (-key, self._spool.tell(), len(record)))
        self._spool.write(record)
        self.bytes_kept += len(record)
        while self.bytes_kept > self.max_bytes and len(self._kept) > 1:
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
    """The texts of a KeyedSample; the first one comes when all have been read."""
    sample = KeyedSample(max_bytes, seed)
    for text in texts:
        sample.add([text])
    logger.info(
        "sample: %d of %d documents, %.1f of %.1f MB",
        sample.num_kept, sample.num_seen, sample.bytes_kept / 1e6, sample.bytes_seen / 1e6,
    )  # fmt: skip
    for (text,) in sample:
        yield text

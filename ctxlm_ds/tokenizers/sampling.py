"""Keyed samples of huge corpora, drawn in one pass: (seed, document number) alone decide which documents are in one."""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

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


class LanguageSample:
    """Texts of several languages: a language's share of the bytes is that of the corpus to the power `exponent`.

    The shares are renormalised, and together the texts have about `max_bytes` (by default what the corpus has). A text
    comes several times if its language must be repeated; (seed, language, number in it) alone decide how often. Reads
    the documents twice and stores none. Source: google-research/bert, multilingual.md (0.7); Conneau & Lample 2019
    (arXiv:1901.07291), section 3.1.
    """

    def __init__(
        self,
        documents: Callable[[], Iterable[tuple[str, str]]],
        exponent: float,
        max_bytes: int | None = None,
        seed: int = 0,
    ) -> None:
        """Count the bytes of each language.

        Args:
            documents: returns an iterator of (language, text), the same each time.
            exponent: from 0 (equal shares) to 1 (as they are).
            max_bytes: about the size of the sample.
            seed: decides which texts are in it.
        """
        self._documents, self._seed = documents, seed
        found: Counter[str] = Counter()
        for language, text in documents():
            found[language] += len(text.encode())
        self.bytes_by_language: dict[str, int] = {language: size for language, size in sorted(found.items()) if size}
        """UTF-8 bytes of each language."""
        total = sum(self.bytes_by_language.values())
        weights = {language: (size / total) ** exponent for language, size in self.bytes_by_language.items()}
        self.shares = {language: weight / sum(weights.values()) for language, weight in weights.items()}
        """Share of each language in the sample."""
        wanted = total if max_bytes is None else max_bytes
        self._copies = {one: self.shares[one] * wanted / size for one, size in self.bytes_by_language.items()}

    def __iter__(self) -> Iterator[str]:
        numbers: Counter[str] = Counter()
        for language, text in self._documents():
            if copies := self._copies.get(language):
                name = f"{self._seed}:{language}:{numbers[language]}".encode()
                numbers[language] += 1
                uniform = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64
                for _ in range(int(copies + uniform)):
                    yield text

    def lines(self) -> Iterator[str]:
        """Yield a line for each language: its share of the corpus, of the sample, and how often its texts come."""
        total = sum(self.bytes_by_language.values())
        for language, size in self.bytes_by_language.items():
            share, copies = self.shares[language], self._copies[language]
            yield f"{language}: {size / total:.2%} of the text, {share:.2%} of the sample, x{copies:.3g}"

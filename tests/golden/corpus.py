"""The text of the golden runs: made by arithmetic alone, the same under every version of every library."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = [
    "river", "mountain", "garden", "village", "winter", "teacher", "letter", "bridge", "market", "lantern", "the", "a",
    "of", "and", "in", "it", "was", "had", "walked", "slowly", "reading", "books", "unhappy", "times", "worst", "best",
    "followed", "painted", "measured", "remembered", "reopened", "quietly",
]  # fmt: skip
DOCUMENTS, LONGEST_DOCUMENT, LONGEST_SENTENCE = 160, 6, 8
MULTIPLIER, INCREMENT, MODULUS = 6364136223846793005, 1442695040888963407, 1 << 64


class Numbers:
    """A linear congruential generator (Knuth's MMIX), of which the upper half is taken."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, limit: int) -> int:
        """The next number from 0 to limit - 1."""
        self._state = (self._state * MULTIPLIER + INCREMENT) % MODULUS
        return (self._state >> 33) % limit


def make_documents(seed: int = 20) -> list[str]:
    """Documents of 1 to LONGEST_DOCUMENT sentences of 2 to LONGEST_SENTENCE words: rows hold several of them."""
    numbers = Numbers(seed)
    documents = []
    for _ in range(DOCUMENTS):
        sentences = []
        for _ in range(1 + numbers.below(LONGEST_DOCUMENT)):
            words = [WORDS[numbers.below(len(WORDS))] for _ in range(2 + numbers.below(LONGEST_SENTENCE - 1))]
            sentences.append(" ".join(words).capitalize() + ".?!"[numbers.below(3)])
        documents.append(" ".join(sentences))
    return documents


def write_corpus(path: Path) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_documents()))

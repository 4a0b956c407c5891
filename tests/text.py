"""Synthetic English-like text for tests: deterministic, several sentences a document, no two documents alike."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

_ADJECTIVES, _NOUNS, _VERBS, _ADVERBS, _NAMES, _SYLLABLES = (
    line.split()
    for line in """
    old quiet northern broken green narrow early patient hollow bright distant wooden careful silver late
    river harbour teacher engine forest letter village winter machine garden mountain market bridge lantern library
    crossed repaired described followed painted measured carried watched answered remembered opened built
    slowly often never again twice together quietly yesterday almost carefully
    Ada Bruno Clara Dmitri Elena Farid Greta Hugo Iris Jonas Kamala Leon Mira Nils Olga Pavel
    ba cor del fen gar hin jor kal lum mer nos pra quil rus san tol ul ven wick yar zed stra blen thor
    """.strip().splitlines()
)
_OPENINGS = ("However,", "In 1897", "Later,", "According to Dr. Weber,", "By the end of May", "At first")


def _invented(rng: random.Random) -> str:
    """A word that hardly any other text has, so that vocabularies can grow."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))


def _sentence(rng: random.Random) -> str:
    def thing() -> str:
        return f"the {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"

    forms: list[Callable[[], str]] = [
        lambda: f"{rng.choice(_NAMES)} {rng.choice(_VERBS)} {thing()} {rng.choice(_ADVERBS)}.",
        lambda: f"{rng.choice(_OPENINGS)} {thing()} {rng.choice(_VERBS)} {rng.randint(2, 90)} {rng.choice(_NOUNS)}s.",
        lambda: f"The {_invented(rng)} of {_invented(rng).capitalize()} {rng.choice(_VERBS)} a {_invented(rng)}.",
        lambda: f"Why had {rng.choice(_NAMES)} {rng.choice(_VERBS)} {thing()} near {thing()}?",
        lambda: f'"{thing().capitalize()} {rng.choice(_VERBS)} us," said {rng.choice(_NAMES)}; {thing()} was gone.',
        lambda: (
            f"The {rng.choice(_NOUNS)}, which {rng.choice(_NAMES)} {rng.choice(_VERBS)}, cost {rng.randint(1, 99)}.5; "
            f"{thing()} and {thing()} {rng.choice(_VERBS)} it {rng.choice(_ADVERBS)}."
        ),
        lambda: f"It was {rng.choice(_ADVERBS)} {rng.choice(_ADJECTIVES)}!",
    ]
    return rng.choice(forms)()


def make_documents(num_documents: int, seed: int = 0, max_sentences: int = 24) -> list[str]:
    """`num_documents` texts of 1 to `max_sentences` sentences in one or more lines (paragraphs)."""
    rng = random.Random(seed)
    documents = []
    for number in range(num_documents):
        sentences = [f"Chapter {number} is about {rng.choice(_NAMES)}."]
        sentences += [_sentence(rng) for _ in range(rng.randint(0, max_sentences - 1))]
        paragraphs: list[list[str]] = [[]]
        for sentence in sentences:
            if paragraphs[-1] and rng.random() < 0.2:
                paragraphs.append([])
            paragraphs[-1].append(sentence)
        documents.append("\n".join(" ".join(paragraph) for paragraph in paragraphs))
    return documents


def write_corpus(path: str | Path, num_documents: int = 200, seed: int = 0, format: str = "jsonl") -> list[str]:
    """Write documents and return them.

    `format`: `text` (blank lines between documents), `jsonl`, `wikiextractor`, `parquet`; those of
    lines also with `.gz`, `.xz`, `.bz2` or `.zst` behind it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = make_documents(num_documents, seed)
    titles = [f"chapter {number}" for number in range(num_documents)]
    if format == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"title": titles, "text": documents}), path, row_group_size=20)
        return documents
    kind, _, compression = format.partition(".")
    lines = "".join(_LAYOUTS[kind](*pair) for pair in zip(titles, documents, strict=True)).encode()
    if compression == "zst":
        import zstandard

        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    else:
        compress = {"": bytes, "gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}
        path.write_bytes(compress[compression](lines))
    return documents


_LAYOUTS: dict[str, Callable[[str, str], str]] = {
    "text": lambda title, text: f"{text}\n\n",
    "jsonl": lambda title, text: json.dumps({"title": title, "text": text}) + "\n",
    "wikiextractor": lambda title, text: f'<doc id="7" url="?curid=7" title="{title}">\n{title}\n\n{text}\n\n</doc>\n',
}

"""Rates of a tokenizer on a text, by language, for comparisons.

White space and punctuation separate words, and each punctuation mark is a word (BERT's rule). Chinese, Japanese and
Thai write no spaces: compare characters per token there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ctxlm_ds.console import aligned
from ctxlm_ds.tokenizers.base import Tokenizer

ALL_LANGUAGES = "all"
_BATCH_DOCUMENTS = 64
_COUNTS = ("num_documents", "num_characters", "num_words", "num_tokens", "num_unknown", "num_whole_words")


@dataclass(slots=True)
class LanguageFigures:
    """Counts over the documents of one language."""

    num_documents: int = 0
    num_characters: int = 0
    num_words: int = 0
    num_tokens: int = 0
    num_unknown: int = 0
    num_whole_words: int = 0
    words: Counter[str] = field(default_factory=Counter)

    def rates(self) -> dict[str, float | int]:
        """Return `fertility` (tokens per word), `characters_per_token`, `unknown_rate` (share of the tokens),
        `whole_words` (share of words with one token), and the counts."""
        tokens, words = max(1, self.num_tokens), max(1, self.num_words)
        return {
            "documents": self.num_documents,
            "words": self.num_words,
            "tokens": self.num_tokens,
            "fertility": round(self.num_tokens / words, 4),
            "characters_per_token": round(self.num_characters / tokens, 4),
            "unknown_rate": round(self.num_unknown / tokens, 6),
            "whole_words": round(self.num_whole_words / words, 4),
        }


def tokenizer_report(tokenizer: Tokenizer, documents: Iterable[tuple[str, str]]) -> dict[str, dict[str, float | int]]:
    """Return rates by language, and of `all` if there are several, for documents as (language, text).

    Memory grows with the number of different words.
    """
    figures: dict[str, LanguageFigures] = {}
    for batch in _batches(documents):
        for (language, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
            _add(figures.setdefault(language, LanguageFigures()), tokenizer, text, ids)
    for counted in figures.values():
        _count_whole_words(counted, tokenizer)
    report = {language: figures[language].rates() for language in sorted(figures)}
    if len(figures) != 1:
        report[ALL_LANGUAGES] = _total(figures.values()).rates()
    return report


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    remaining = iter(documents)
    while batch := list(islice(remaining, _BATCH_DOCUMENTS)):
        yield batch


def _add(figures: LanguageFigures, tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> None:
    words = _words(text)
    figures.num_documents += 1
    figures.num_characters += len(text)
    figures.num_words += len(words)
    figures.num_tokens += len(ids)
    figures.num_unknown += list(ids).count(tokenizer.unk_id)
    figures.words.update(words)


def _words(text: str) -> list[str]:
    from tokenizers import pre_tokenizers

    return [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)]


def _count_whole_words(figures: LanguageFigures, tokenizer: Tokenizer) -> None:
    words = sorted(figures.words)
    encoded = tokenizer.encode_batch([tokenizer.sentence_prefix + word for word in words])
    # sentencepiece writes the space before a mark as a separate token if no piece contains both.
    figures.num_whole_words = sum(
        figures.words[word]
        for word, ids in zip(words, encoded, strict=True)
        if len(ids) == 1 and ids[0] != tokenizer.unk_id
    )


def _total(figures: Iterable[LanguageFigures]) -> LanguageFigures:
    total = LanguageFigures()
    for one in figures:
        for name in _COUNTS:
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total


def report_lines(reports: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table of reports by tokenizer, each {"vocab_size": ..., "languages": tokenizer_report(...)}."""
    rows = [[
        "tokenizer", "vocabulary", "language", "words", "tokens/word", "characters/token", "unknown", "whole words",
    ]]  # fmt: skip
    for name, report in reports.items():
        for language, rates in report["languages"].items():
            rows.append([
                name, f"{report['vocab_size']:,}", language, f"{rates['words']:,}", f"{rates['fertility']:.3f}",
                f"{rates['characters_per_token']:.2f}", f"{rates['unknown_rate']:.3%}", f"{rates['whole_words']:.1%}",
            ])  # fmt: skip
    return aligned(rows, left=(0, 2), indent="")

"""Rates of a tokenizer on a text, by language, for comparisons.

White space and punctuation separate words, and each punctuation mark is a word (BERT's rule). Chinese, Japanese and
Thai write no spaces: compare characters per token there.
"""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice

from ctxlm_ds.tokenizers.base import Tokenizer

ALL_LANGUAGES = "all"
_BATCH_DOCUMENTS = 64
logger = logging.getLogger("ctxlm_ds")


def tokenizer_report(tokenizer: Tokenizer, documents: Iterable[tuple[str, str]]) -> dict[str, dict[str, float | int]]:
    """Return rates by language, and of `all` if there are several, for documents as (language, text).

    The rates are `fertility` (tokens per word), `characters_per_token`, `unknown_rate` (share of the tokens) and
    `whole_words` (share of words with one token), next to the counts of documents, words and tokens. Memory grows with
    the number of different words.
    """
    from tokenizers import pre_tokenizers

    cut = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    words: defaultdict[str, Counter[str]] = defaultdict(Counter)
    remaining = iter(documents)
    while batch := list(islice(remaining, _BATCH_DOCUMENTS)):
        for (language, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
            unknown = ids.count(tokenizer.unk_id)
            counts[language].update(documents=1, characters=len(text), tokens=len(ids), unknown=unknown)
            words[language].update(word for word, _ in cut(text))
    for language, counted in words.items():
        counts[language].update(words=counted.total(), whole_words=_count_whole_words(counted, tokenizer))
    report = {language: _rates(counts[language]) for language in sorted(counts)}
    if len(counts) != 1:
        report[ALL_LANGUAGES] = _rates(sum(counts.values(), Counter()))
    return report


def strips_marks(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer takes accents and vowel signs off its text."""
    normalizer = tokenizer.backend.normalizer
    if normalizer is None:
        return False
    kept = unicodedata.normalize("NFC", normalizer.normalize_str("é").lower())
    return "e" in kept and "é" not in kept


def share_with_marks(texts: Iterable[str]) -> float:
    """Return the share of the words between blanks that have a letter with a mark (an accent, a vowel sign)."""
    words = Counter(word for text in texts for word in text.split())
    marked = sum(count for word, count in words.items() if not word.isascii() and _has_mark(word))
    return marked / max(1, words.total())


def _has_mark(word: str) -> bool:
    return any(unicodedata.category(character) == "Mn" for character in unicodedata.normalize("NFD", word))


def _count_whole_words(words: Counter[str], tokenizer: Tokenizer) -> int:
    # sentencepiece writes the space before a mark as a separate token if no piece contains both.
    encoded = tokenizer.encode_batch([tokenizer.sentence_prefix + word for word in words])
    return sum(
        count
        for count, ids in zip(words.values(), encoded, strict=True)
        if len(ids) == 1 and ids[0] != tokenizer.unk_id
    )


def _rates(counts: Counter[str]) -> dict[str, float | int]:
    tokens, words = max(1, counts["tokens"]), max(1, counts["words"])
    return {
        "documents": counts["documents"],
        "words": counts["words"],
        "tokens": counts["tokens"],
        "fertility": round(counts["tokens"] / words, 4),
        "characters_per_token": round(counts["characters"] / tokens, 4),
        "unknown_rate": round(counts["unknown"] / tokens, 6),
        "whole_words": round(counts["whole_words"] / words, 4),
    }


def log_unused_rows(rows: int, tokens: int) -> None:
    """Log that an embedding has more rows than its tokenizer has tokens; as a warning if most are unused."""
    if rows > tokens:
        text = "the embedding has %s rows, the tokenizer %s tokens; model.vocab_size: null takes the tokenizer's size"
        level = logging.WARNING if rows > 2 * tokens else logging.INFO
        logger.log(level, text, f"{rows:,}", f"{tokens:,}")

"""Rules by which documents are dropped: length, characters, Gopher, C4, repetition, language.

Each returns the reason to drop a text, which names the bound and is counted, or None.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.hygiene.corpora import FilterConfig, required_package
from ctxlm_ds.data.hygiene.words import Hashes, ngram_hashes, word_hashes
from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.errors import DataError

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_BULLETS = ("•", "‣", "◦", "▪", "·", "*", "-", "–", "—")
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?:\s|$)")
LANGUAGE_CHARACTERS = 2000
"""Characters given to py3langid; more cost time and change no answer."""
MAX_REPEATED_LINES = 0.30
MAX_REPEATED_LINE_CHARACTERS = 0.20
MAX_TOP_NGRAM = {2: 0.20, 3: 0.18, 4: 0.16}
MAX_REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


def length_reason(text: str, filters: FilterConfig) -> str | None:
    """Return a reason for too few or too many words or characters."""
    for count, unit in ((len(text.split()), "words"), (len(text), "characters")):
        least, most = getattr(filters, f"min_{unit}"), getattr(filters, f"max_{unit}")
        if count < least:
            return f"fewer than {least} {unit}"
        if most is not None and count > most:
            return f"more than {most} {unit}"
    return None


def character_reason(text: str, filters: FilterConfig) -> str | None:
    """Return a reason for too small a share of letters and marks among the characters that are not blank."""
    visible = letters = 0
    for character, count in Counter(text).items():
        visible += count * (not character.isspace())
        letters += count * (unicodedata.category(character)[0] in "LM")
    return f"fewer than {filters.min_letters:.0%} letters" if letters < filters.min_letters * visible else None


def gopher_reason(text: str, check_stop_words: bool) -> str | None:
    """Apply the document rules of Gopher (Rae et al. 2021, arXiv:2112.11446, A.1.1)."""
    words = text.split()
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not 50 <= len(words) <= 100_000:
        return "Gopher: not 50 to 100,000 words"
    if not 3 <= sum(map(len, words)) / len(words) <= 10:
        return "Gopher: mean word length not 3 to 10"
    for symbol, copies in (("#", text.count("#")), ("…", text.count("...") + text.count("…"))):
        if copies > 0.1 * len(words):
            return f"Gopher: more than one {symbol} in ten words"
    if sum(line.startswith(_BULLETS) for line in lines) > 0.9 * len(lines):
        return "Gopher: over 90% of the lines are bullet points"
    if sum(line.endswith(("...", "…")) for line in lines) > 0.3 * len(lines):
        return "Gopher: over 30% of the lines end in an ellipsis"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * len(words):
        return "Gopher: under 80% of the words have a letter"
    if check_stop_words and len(STOP_WORDS.intersection(map(str.lower, words))) < 2:
        return "Gopher: fewer than two of its stop words"
    return None


def c4_reason(text: str) -> str | None:
    """Apply the page rules of C4 (Raffel et al. 2020, JMLR 21(140), 2.2) without its list of bad words."""
    if "lorem ipsum" in text.lower():
        return "C4: lorem ipsum"
    if "{" in text:
        return "C4: a curly bracket"
    if len(_SENTENCE_END.findall(text)) < 3:
        return "C4: fewer than 3 sentences"
    return None


class LanguageIdentifier:
    """py3langid's model (naive Bayes over byte n-grams, Lui & Baldwin 2012), and the languages that are wanted.

    Raises DataError if py3langid is not installed or does not know a language.
    """

    def __init__(self, languages: Sequence[str]) -> None:
        langid = required_package("py3langid", "--languages").langid
        self._languages = languages
        self._model = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)
        unknown = sorted(set(languages) - set(self._model.labels))
        if unknown:
            choice = " ".join(sorted(set(self._model.labels)))
            raise DataError(f"--languages {' '.join(unknown)}: not known to py3langid; choose among {choice}")

    def reason(self, text: str) -> str | None:
        """Return a reason for another language than the wanted ones."""
        code = self._model.classify(text[:LANGUAGE_CHARACTERS])[0]
        return None if code in self._languages else f"language {code}"


def repetition_reason(text: str) -> str | None:
    """Apply the repetition rules of Gopher (table A1); a share is of the characters inside words."""
    for unit, separator in (("lines", "\n"), ("paragraphs", "\n\n")):
        pieces = [piece.strip() for piece in text.split(separator) if piece.strip()]
        counts = Counter(pieces)
        if len(pieces) - len(counts) > MAX_REPEATED_LINES * len(pieces):
            return f"over {MAX_REPEATED_LINES:.0%} of the {unit} repeat another"
        repeated = sum((count - 1) * len(piece) for piece, count in counts.items())
        if repeated > MAX_REPEATED_LINE_CHARACTERS * sum(map(len, pieces)):
            return f"repeated {unit} hold over {MAX_REPEATED_LINE_CHARACTERS:.0%} of the text"
    words, lengths = word_hashes(text)
    total = int(lengths.sum())
    for size, bound in MAX_TOP_NGRAM.items():
        if top_ngram_characters(ngram_hashes(words, size), lengths, size) > bound * total:
            return f"one {size}-gram holds over {bound:.0%} of the text"
    for size, bound in MAX_REPEATED_NGRAMS.items():
        if repeated_ngram_characters(ngram_hashes(words, size), lengths, size) > bound * total:
            return f"repeated {size}-grams hold over {bound:.0%} of the text"
    return None


@compiled
def top_ngram_characters(grams: Hashes, lengths: NDArray[np.int32], size: int) -> int:
    """Return the characters in all copies of the most frequent n-gram (at least 2; the longest of several)."""
    counts = {np.uint64(0): 0}
    for gram in grams:
        counts[gram] = counts.get(gram, 0) + 1
    most, characters = 2, 0
    for start in range(len(grams)):
        count = counts[grams[start]]
        if count >= most:
            held = count * lengths[start : start + size].sum()
            characters = held if count > most else max(held, characters)
            most = count
    return characters


@compiled
def repeated_ngram_characters(grams: Hashes, lengths: NDArray[np.int32], size: int) -> int:
    """Return the characters in n-grams that occurred before, without counting any twice."""
    seen = {np.uint64(0)}
    characters, start = 0, 0
    while start < len(grams):
        if grams[start] in seen:
            characters += lengths[start : start + size].sum()
            start += size
        else:
            seen.add(grams[start])
            start += 1
    return characters

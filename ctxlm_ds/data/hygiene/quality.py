"""Documents that are dropped whole: by length, characters, the rules of Gopher and C4, repetition, or language.

In: a text. Out: why it is dropped, in words that say the bound (they are counted), or None; an ISO 639 code and its
probability, by py3langid's naive Bayes over byte n-grams (Lui & Baldwin 2012; 139 languages). Repetition is measured as
in Gopher (Rae et al. 2021, arXiv:2112.11446, table A1); a share is of the characters inside words. Not here: what is
taken out of a text (stages.py).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.hygiene.corpora import FilterConfig
from ctxlm_ds.data.hygiene.words import Hashes, ngram_hashes, word_hashes
from ctxlm_ds.data.numba_random import compiled
from ctxlm_ds.errors import DataError

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_BULLETS = ("•", "‣", "◦", "▪", "·", "*", "-", "–", "—")
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?:\s|$)")
_C4_MIN_SENTENCES = 3
MAX_CHARACTERS = 2000
"""Characters that are looked at; more change no answer and cost time."""
MAX_REPEATED_LINES = 0.30
MAX_REPEATED_LINE_CHARACTERS = 0.20
MAX_TOP_NGRAM = {2: 0.20, 3: 0.18, 4: 0.16}
MAX_REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


def length_reason(text: str, num_words: int, filters: FilterConfig) -> str | None:
    """Too few or too many words or characters."""
    if num_words < filters.min_words:
        return f"fewer than {filters.min_words} words"
    if filters.max_words is not None and num_words > filters.max_words:
        return f"more than {filters.max_words} words"
    if len(text) < filters.min_characters:
        return f"fewer than {filters.min_characters} characters"
    if filters.max_characters is not None and len(text) > filters.max_characters:
        return f"more than {filters.max_characters} characters"
    return None


def character_reason(text: str, filters: FilterConfig) -> str | None:
    """Too few letters, or letters of other scripts."""
    counts = Counter(text)
    scripts: Counter[str] = Counter()
    visible = 0
    for character, count in counts.items():
        if character.isspace():
            continue
        visible += count
        script = script_of(character)
        if script is not None:
            scripts[script] += count
    letters = scripts.total()
    if letters < filters.min_letters * visible:
        return f"fewer than {filters.min_letters:.0%} letters"
    if filters.scripts:
        allowed = sum(scripts[script.lower()] for script in filters.scripts) + scripts["combining"]
        if allowed < filters.min_script_share * letters:
            return f"less than {filters.min_script_share:.0%} {', '.join(sorted(filters.scripts))} letters"
    return None


@cache
def script_of(character: str) -> str | None:
    """The script of a letter or mark, as the first word of its Unicode name; None for anything else."""
    if unicodedata.category(character)[0] not in "LM":
        return None
    return unicodedata.name(character, "unnamed").split()[0].split("-")[0].lower()


def gopher_reason(text: str, check_stop_words: bool) -> str | None:
    """The document rules of Gopher (Rae et al. 2021, arXiv:2112.11446, A.1.1)."""
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
    """The page rules of C4 (Raffel et al. 2020, JMLR 21(140), 2.2) without its list of bad words."""
    if "lorem ipsum" in text.lower():
        return "C4: lorem ipsum"
    if "{" in text:
        return "C4: a curly bracket"
    if len(_SENTENCE_END.findall(text)) < _C4_MIN_SENTENCES:
        return f"C4: fewer than {_C4_MIN_SENTENCES} sentences"
    return None


class LanguageIdentifier:
    """One model a process. Raises DataError where py3langid is not installed or does not know a language."""

    def __init__(self, languages: Sequence[str]) -> None:
        try:
            import py3langid  # noqa: F401
        except ImportError as error:
            raise DataError(
                "--languages needs the package py3langid, which is not installed here; pip install py3langid"
            ) from error
        self._model = _load_model()
        known = set(self._model.labels)
        unknown = sorted(set(languages) - known)
        if unknown:
            choice = " ".join(sorted(known))
            raise DataError(f"--languages {' '.join(unknown)}: not known to py3langid; choose among {choice}")

    def __call__(self, text: str) -> tuple[str, float]:
        """(code, probability)."""
        code, probability = self._model.classify(text[:MAX_CHARACTERS])
        return str(code), float(probability)


@cache
def _load_model() -> Any:
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def language_reason(
    text: str, identifier: LanguageIdentifier, languages: Sequence[str], min_confidence: float
) -> str | None:
    """Another language than the wanted ones (none given: any), or too uncertain a one."""
    code, probability = identifier(text)
    if languages and code not in languages:
        return f"language {code}"
    if probability < min_confidence:
        return f"language under {min_confidence:.0%} certain"
    return None


def repetition_reason(text: str) -> str | None:
    """What repeats too often: lines, paragraphs, one short n-gram, or long n-grams together."""
    for unit, separator in (("lines", "\n"), ("paragraphs", "\n\n")):
        reason = _repeated_pieces(unit, [piece.strip() for piece in text.split(separator)])
        if reason:
            return reason
    words, lengths = word_hashes(text)
    total = int(lengths.sum())
    if total == 0:
        return None
    for size, bound in MAX_TOP_NGRAM.items():
        if top_ngram_characters(ngram_hashes(words, size), lengths, size) > bound * total:
            return f"one {size}-gram holds over {bound:.0%} of the text"
    for size, bound in MAX_REPEATED_NGRAMS.items():
        if repeated_ngram_characters(ngram_hashes(words, size), lengths, size) > bound * total:
            return f"repeated {size}-grams hold over {bound:.0%} of the text"
    return None


def _repeated_pieces(unit: str, pieces: Sequence[str]) -> str | None:
    filled = [piece for piece in pieces if piece]
    seen: set[str] = set()
    repeated, repeated_characters = 0, 0
    for piece in filled:
        if piece in seen:
            repeated += 1
            repeated_characters += len(piece)
        seen.add(piece)
    if repeated > MAX_REPEATED_LINES * len(filled):
        return f"over {MAX_REPEATED_LINES:.0%} of the {unit} repeat another"
    if repeated_characters > MAX_REPEATED_LINE_CHARACTERS * sum(map(len, filled)):
        return f"repeated {unit} hold over {MAX_REPEATED_LINE_CHARACTERS:.0%} of the text"
    return None


def top_ngram_characters(grams: Hashes, lengths: NDArray[np.int32], size: int) -> int:
    """Characters in all copies of the n-gram that occurs most often (at least twice; the longest of several)."""
    return int(_top_ngram(grams, lengths, size))


def repeated_ngram_characters(grams: Hashes, lengths: NDArray[np.int32], size: int) -> int:
    """Characters in n-grams that occurred before, none counted twice."""
    return int(_repeated_ngrams(grams, lengths, size))


@compiled
def _slot(table: Hashes, key: np.uint64) -> int:
    """Where `key` stands in an open table, or the empty slot (0) where it would."""
    mask = len(table) - 1
    slot = int(key >> np.uint64(1)) & mask
    while table[slot] != 0 and table[slot] != key:
        slot = (slot + 1) & mask
    return slot


@compiled
def _empty_table(entries: int) -> Hashes:
    size = 16
    while size < 2 * entries:
        size *= 2
    return np.zeros(size, dtype=np.uint64)


@compiled
def _top_ngram(grams: Hashes, lengths: NDArray[np.int32], size: int) -> int:
    table = _empty_table(len(grams))
    counts = np.zeros(len(table), dtype=np.int64)
    for index in range(len(grams)):
        key = grams[index] | np.uint64(1)
        slot = _slot(table, key)
        table[slot] = key
        counts[slot] += 1
    most, characters = 2, 0
    for index in range(len(grams)):
        count = counts[_slot(table, grams[index] | np.uint64(1))]
        held = count * lengths[index : index + size].sum()
        if count > most or (count == most and held > characters):
            most, characters = count, held
    return characters


@compiled
def _repeated_ngrams(grams: Hashes, lengths: NDArray[np.int32], size: int) -> int:
    table = _empty_table(len(grams))
    characters, index = 0, 0
    while index < len(grams):
        key = grams[index] | np.uint64(1)
        slot = _slot(table, key)
        if table[slot] == key:
            characters += lengths[index : index + size].sum()
            index += size
        else:
            table[slot] = key
            index += 1
    return characters

"""Documents that are dropped whole by their length, their characters, the rules of Gopher and C4, or their language.

In: a text. Out: why it is dropped, in words that say the bound and not the value (they are counted), or None; an ISO
639 code and its probability, by py3langid's naive Bayes over byte n-grams (Lui & Baldwin 2012; 139 languages). Not
here: repetition (repetition.py), what is taken out of a text (cleaning.py).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from ctxlm_ds.data.hygiene.corpora import FilterConfig
from ctxlm_ds.errors import DataError

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_BULLETS = ("•", "‣", "◦", "▪", "·", "*", "-", "–", "—")
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?:\s|$)")
_C4_MIN_SENTENCES = 3
MAX_CHARACTERS = 2000
"""Characters that are looked at; more change no answer and cost time."""


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

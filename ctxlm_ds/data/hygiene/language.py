"""The language of a text, by py3langid's naive Bayes over byte n-grams (Lui & Baldwin 2012; 139 languages).

In: a text. Out: an ISO 639 code and its probability. Not here: which languages are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from ctxlm_ds.errors import DataError

MAX_CHARACTERS = 2000
"""Characters that are looked at; more change no answer and cost time."""


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

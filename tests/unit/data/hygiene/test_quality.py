"""Length, character, Gopher, C4 and language rules: each on a text that just passes and one that just does not."""

from __future__ import annotations

import pytest

from ctxlm_ds.data.hygiene.corpora import FilterConfig
from ctxlm_ds.data.hygiene.quality import LanguageIdentifier, c4_reason, character_reason, gopher_reason, length_reason
from ctxlm_ds.errors import DataError

PROSE = "The patient teacher opened the wooden bridge to the harbour and measured that lantern with care. " * 4
LANGUAGES = {
    "en": "The library stood near the old market, and nobody had opened its doors since the winter of that year.",
    "de": "Die Bibliothek stand neben dem alten Markt, und niemand hatte ihre Türen seit jenem Winter geöffnet.",
    "fr": "La bibliothèque se trouvait près du vieux marché et personne n'avait ouvert ses portes depuis l'hiver.",
    "ru": "Библиотека стояла рядом со старым рынком, и никто не открывал её двери с той самой зимы.",
    "zh": "图书馆就在旧市场旁边，从那年冬天起就没有人打开过它的大门。",
}


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        ({"min_words": 3}, None),
        ({"min_words": 4}, "fewer than 4 words"),
        ({"max_words": 3}, None),
        ({"max_words": 2}, "more than 2 words"),
        ({"min_characters": 13}, None),
        ({"min_characters": 14}, "fewer than 14 characters"),
        ({"max_characters": 13}, None),
        ({"max_characters": 12}, "more than 12 characters"),
    ],
)
def test_length(filters: dict[str, int], reason: str | None) -> None:
    text = "one two three"
    assert length_reason(text, FilterConfig.model_validate(filters)) == reason


def test_share_of_letters_leaves_blanks_out() -> None:
    assert character_reason("ab  12", FilterConfig(min_letters=0.5)) is None
    assert character_reason("ab  123", FilterConfig(min_letters=0.5)) == "fewer than 50% letters"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PROSE, None),
        (" ".join(PROSE.split()[:50]), None),
        (" ".join(PROSE.split()[:49]), "not 50 to 100,000 words"),
        ("the of " + "abcdefghijklm " * 60, "mean word length"),
        (PROSE + "# " * 10, "more than one # in ten words"),
        ("\n".join(f"- {line}" for line in [PROSE] * 3), "bullet points"),
        ("\n".join([PROSE.strip() + "..."] * 3), "end in an ellipsis"),
        (PROSE + "1234 " * 20, "under 80% of the words"),
        ("river mountain lantern " * 30, "fewer than two of its stop words"),
    ],
)
def test_gopher(text: str, reason: str | None) -> None:
    found = gopher_reason(text, check_stop_words=True)
    assert found is None if reason is None else found is not None and reason in found


def test_gopher_stop_words_are_asked_of_english_alone() -> None:
    assert gopher_reason("river mountain lantern " * 30, check_stop_words=False) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("One here. Two there! Three anywhere?", None),
        ("One here. Two there! Three", "C4: fewer than 3 sentences"),
        ("One. Two. Three. Lorem ipsum dolor.", "C4: lorem ipsum"),
        ("One. Two. Three. if (x) { y }", "C4: a curly bracket"),
    ],
)
def test_c4(text: str, reason: str | None) -> None:
    assert c4_reason(text) == reason


def test_languages_are_told_apart() -> None:
    identifier = LanguageIdentifier(["en"])
    reasons = {code: identifier.reason(text) for code, text in LANGUAGES.items()}
    assert reasons == {code: None if code == "en" else f"language {code}" for code in LANGUAGES}
    assert LanguageIdentifier(["en", "de"]).reason(LANGUAGES["de"]) is None


def test_an_unknown_language_is_named() -> None:
    with pytest.raises(DataError, match="--languages english: not known to py3langid; choose among"):
        LanguageIdentifier(["en", "english"])

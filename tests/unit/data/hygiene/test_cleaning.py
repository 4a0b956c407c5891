"""Cleaning rules: what each takes and what it leaves."""

from __future__ import annotations

from importlib.util import find_spec
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxlm_ds.data.hygiene.cleaning import PACKAGES, RULES, clean
from ctxlm_ds.data.hygiene.corpora import CleaningRule


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("control_characters", "a\x00b\u200b\ufeffc\r\nd\re\tf", "abc\nd\ne\tf"),
        ("nfc", "cafe\u0301 Vie\u0323\u0302t \u0e33", "café Việt \u0e33"),
        ("whitespace", "  a \u00a0 b\t c \n\n\n\n d", "a b c\n\nd"),
        ("markup", "<p class='x'>A &amp; B</p> 1 < 2 <!-- no\nno -->", "A & B 1 < 2 "),
        ("markup", "a<!-- b <!-- c --> d --> e <!-- f", "a d --> e <!-- f"),
        ("wiki_tail", "Text.\n\nHistory\nMore.\n\nReferences\nSmith 1990.", "Text.\n\nHistory\nMore."),
        ("wiki_tail", "Text.\n== Einzelnachweise ==\nMeier.", "Text."),
        ("wiki_tail", "References\nis a play of 1949.", "References\nis a play of 1949."),
        ("prose_lines", "History\nIt began.\n- a\n\n“No?”\n始まった。\n1 | 2", "It began.\n\n“No?”\n始まった。"),
        ("boilerplate_lines", "News.\nAdvertisement\nShare this on X\nRead more: here\nShare prices fell.", None),
        (
            "c4_lines",
            "This line has five words.\nToo short.\nThis one does not end properly\nPlease enable JavaScript in your "
            "browser.\nWe have a privacy policy for you.\nIt was cited [12] in 1990 [citation needed].",
            "This line has five words.\nIt was cited  in 1990 .",
        ),
        (
            "gutenberg",
            "By X\n*** START OF THE PROJECT GUTENBERG EBOOK A ***\nOnce.\n"
            "*** END OF THE PROJECT GUTENBERG EBOOK A ***\nLicence",
            "Once.",
        ),
        ("gutenberg", "No marks here.", "No marks here."),
        ("gpt_standard", " “No”—she said…\n\n (why?!)\tC:\\x --", "“No” - she said... \n ( why ? ! ) C:\\x --"),
        ("fix_text", "â€œNoâ€\x9d â€” itâ€™s &lt;3", '"No" — it\'s <3'),
        ("join_lines", "A wrapped\nline of text.\n\nNew\nparagraph.", "A wrapped line of text.\nNew paragraph."),
    ],
)
def test_rules(rule: str, text: str, expected: str | None) -> None:
    assert RULES[rule](text) == ("News.\nShare prices fell." if expected is None else expected)


def test_every_rule_of_the_schema_exists() -> None:
    assert set(get_args(CleaningRule)) == set(RULES)


def test_characters_taken_are_counted_by_rule() -> None:
    text, removed = clean("a  b\x00", ["control_characters", "whitespace"])
    assert (text, removed) == ("a b", [1, 1])


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_any_text_can_be_cleaned(text: str) -> None:
    cleaned, removed = clean(text, [rule for rule in RULES if rule not in PACKAGES or find_spec(PACKAGES[rule])])
    assert len(text) - len(cleaned) == sum(removed)

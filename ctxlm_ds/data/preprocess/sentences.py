"""Split running text into sentences by rule, without a model or a download.

A line end ends a paragraph, and so a sentence (join hard-wrapped text first). Inside a paragraph a sentence ends at a
stop of its script, with the quotes and brackets that close behind it. A full stop does not end one behind an
abbreviation, an initial, a decimal or a list number. An abbreviation that often ends a sentence ("Inc.", "p.m.",
"т. д.") ends one only before a word that usually starts one: the idea of Kiss and Strunk's Punkt (2006), with fixed
instead of learned lists. Before lower case and emoji the rules follow ICU, sentencex and pysbd.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

SPLITTER_VERSION = 2
"""Raised whenever a boundary changes. Datasets record it, and parts with different versions are not joined."""

_CLOSING = "\"'”’»›“«‹)\\]}"  # German closes with “ and «
_OPENING = "\"'“‘«‹„‚»›(\\[{¿¡"
_FULL_STOPS = "。！？｡।॥؟۔።፧፨။។៕։༎"
"""Stops that are unambiguous in their scripts: no space is needed behind them."""
_EMOJI = "\u2600-\u27bf\ufe0f\u200d\U0001f000-\U0001faff"

# Every repetition below that can fail is bounded, or entered once per run: the time stays linear in the text.
_STOP = re.compile(f"[.!?…‽{_FULL_STOPS}]")  # one class: the scan for it is most of the work
_STOPS = re.compile(f"[.!?…‽]+|[{_FULL_STOPS}]+")
_BEHIND_STOP = re.compile(
    rf"""
    (?P<stop> (?:\.[ ]){{1,8}}\.+ | [.!?…‽]+ )     # one stop, a run of them, or a spaced ellipsis
    (?P<close> [{_CLOSING}]{{0,8}} )
    (?: \[\d{{1,3}}\] ){{0,8}}                    # reference marks
    (?: \s+ | (?= [{_EMOJI}] ) )
    (?= (?P<emoji> [{_EMOJI}\s]{{0,64}} ) (?P<open> [{_OPENING}]{{0,8}} ) (?P<next> \w+ | \S | $ ) )
    |
    [{_FULL_STOPS}] [{_FULL_STOPS}.!?…]* [{_CLOSING}」』）】〉》]* \s*
    """,
    re.VERBOSE,
)
_ENDS = re.compile(rf"[.!?…‽:;{_FULL_STOPS}][{_CLOSING}」』）】〉》]*$")
SHORT_CHARACTERS, FEWEST_JUDGED = 600, 20
"""Median length of documents that are probably pieces of longer ones, and the fewest that are judged."""
_LINES = re.compile(r"[\n\r\v\f\x85\u2028\u2029]+")
_WORD_EDGE = re.compile(r"[\s(\[{\"'“‘«‹„‚»›/—–]")
_WORDS = {
    name: frozenset(" ".join(lines).split())
    for name, lines in json.loads(Path(__file__).with_name("sentence_words.json").read_text("utf-8")).items()
}
_NEVER_LAST = _WORDS["never_last"]
"""Abbreviations that stand before what they belong to, so hardly ever at the end of a sentence."""
_BEFORE_NUMBER = _WORDS["before_number"]
"""Abbreviations before a number (a numeral, a date); otherwise they are words."""
_SOMETIMES_LAST = _WORDS["sometimes_last"]
"""Abbreviations that may also end a sentence: the next word decides (as after any acronym with full stops)."""
_ABBREVIATIONS = (_NEVER_LAST, _BEFORE_NUMBER, _SOMETIMES_LAST)
_STARTERS = _WORDS["starters"]
"""Words (capitalised in the text) that usually start a sentence rather than continue a name."""
_GERMAN_STARTERS = _WORDS["german_starters"]
_GERMAN = re.compile(r"\b(?:und|der|nicht|ist|wurden?|eine[nmr]?|für|sich|auch|dem|zum|zur|aus|bei)\b")
_GERMAN_DATES = _WORDS["german_dates"]
_GERMAN_WINDOW = 200
_ROMAN = re.compile(r"[IVXLC]+$")
_ORDINAL = re.compile(r"(?:\d{1,2}|[IVX]{2,5})$")
_ACRONYM = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]$")
_SPACED = re.compile(r"(?<![^\W\d_])(?:[^\W\d_]\.\s?){1,3}[^\W\d_]{1,3}$")
"""An abbreviation of several words, without its last full stop: `z. B`, `т. е`, `n. Chr`."""
_LIST_NUMBER = re.compile(r"(?:\d{1,3}|[A-Za-z]|[ivxIVX]{1,4})$")
_SYMBOLS = frozenset("$£€#@*•~+§")


def cut_warning(texts: Sequence[str], by_sentence: bool) -> str:
    """Return a warning if documents of plain text are too short to learn from, or line ends cut sentences; else ""."""
    lines = [line for text in texts for line in text.rstrip().splitlines()[:-1] if line.strip()]
    open_texts, open_lines = ([_ENDS.search(part.rstrip()) is None for part in parts] for parts in (texts, lines))
    warnings = []
    if len(texts) >= FEWEST_JUDGED and median(map(len, texts)) < SHORT_CHARACTERS:
        warnings.append(
            f"documents of {median(len(text.split()) for text in texts):.0f} words (median of the first {len(texts)}), "
            f"{fmean(open_texts):.0%} of which do not end like a sentence: if they are pieces of longer texts, say "
            "what a document is with --document file, blank or lines:N"
        )
    if by_sentence and len(lines) >= FEWEST_JUDGED and fmean(open_lines) > 0.5:
        warnings.append(
            f"{fmean(open_lines):.0%} of the line ends inside documents cut a sentence into two: join hard-wrapped "
            "lines first (tools/corpus.py --clean join_lines)"
        )
    return "; ".join(warnings)


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """Return the sentences of `text`, stripped and not empty; without white space they add up to `text`.

    With `keep_newlines` the last sentence of a line keeps the line ends behind it.
    """
    sentences: list[str] = []
    start = 0
    for match in _LINES.finditer(text):
        if _split_line(text[start : match.start()], sentences) and keep_newlines:
            sentences[-1] += match.group()
        start = match.end()
    _split_line(text[start:], sentences)
    return sentences


def _split_line(line: str, sentences: list[str]) -> bool:
    """Append the sentences of one paragraph. Returns False if it is blank."""
    count = len(sentences)
    start = position = 0
    while (stop := _STOP.search(line, position)) is not None:
        match = _BEHIND_STOP.match(line, stop.start())
        if match is None:
            position = _STOPS.match(line, stop.start()).end()  # type: ignore[union-attr]
            continue
        position = match.end()
        if match["stop"] is None or _is_boundary(line, start, match):
            sentence = line[start:position].strip()
            if sentence:
                sentences.append(sentence)
            start = position
    rest = line[start:].strip()
    if rest:
        sentences.append(rest)
    return len(sentences) > count


def _is_boundary(line: str, start: int, match: re.Match[str]) -> bool:
    """Return whether the sentence that began at `start` ends at this match."""
    stop, close, emoji, opening, following = match.group("stop", "close", "emoji", "open", "next")
    if following[:1].islower() and opening[:1] not in ("¿", "¡"):
        is_ellipsis = "…" in stop or (len(stop) > 1 and not stop.strip(". "))
        return not close and not is_ellipsis and _ends_before_lower_case(line, start, match)
    if emoji or not following:
        return bool(emoji)
    if not following[0].isalnum() and not opening:
        return following[0] in _SYMBOLS
    if stop != ".":
        return True
    word = _last_word(line[max(start, match.start() - 40) : match.start()])
    if close or not word:
        return not (word.lower() in _NEVER_LAST and not _is_starter(line, match))
    if len(word) == 1 and word.isalpha() and len(following) <= 3 and line.startswith(".", match.end("next")):
        return False  # "z. B.", "n. Chr."
    before = match.start() - len(word)
    is_first = before - start < 8 and not line[start:before].strip(" \t([")
    return _word_ends_sentence(word, line, match, is_first)


def _ends_before_lower_case(line: str, start: int, match: re.Match[str]) -> bool:
    """Return whether the sentence ends here although lower case follows: only in text that has no capitals.

    In other text an exclamation or a question that lower case follows is a title ("Jeopardy! is"), an interjection or
    dialogue.
    """
    opening = line[start : start + 16].lstrip(" \t" + _OPENING)[:1]
    if match["stop"] != ".":
        return bool(match["emoji"]) or opening.islower()
    word = _last_word(line[max(start, match.start() - 40) : match.start()]).lower()
    is_plain = len(word) > 1 and not _ACRONYM.match(word) and not word.isdigit()
    return is_plain and opening.islower() and not any(word in words for words in _ABBREVIATIONS)


def _last_word(text: str) -> str:
    """Return the last word of `text`; an abbreviation of several words without its spaces."""
    word = text[text.rfind(" ") + 1 :]
    if len(word) <= 3 and (spaced := _SPACED.search(text)) is not None:
        joined = "".join(spaced.group().split())
        if joined.lower() in _NEVER_LAST or joined.lower() in _SOMETIMES_LAST:
            return joined
    if word.isalnum():
        return word
    return _WORD_EDGE.split(text)[-1].strip(_CLOSING)


def _is_starter(line: str, match: re.Match[str]) -> bool:
    """Return whether the word behind this match usually starts a sentence."""
    lower = match["next"].lower()
    return lower in _STARTERS or (lower in _GERMAN_STARTERS and _is_german(line, match))


def _is_german(line: str, match: re.Match[str]) -> bool:
    """Return whether the text around this match is German: only there do ordinals stand before capitals."""
    around = line[max(0, match.start() - _GERMAN_WINDOW) : match.end() + _GERMAN_WINDOW]
    return len(set(_GERMAN.findall(around))) > 1


def _word_ends_sentence(word: str, line: str, match: re.Match[str], is_first: bool) -> bool:
    """Return whether the full stop between `word`, which may open its line, and no lower case ends the sentence."""
    lower, following = word.lower(), match["next"]
    if is_first and _LIST_NUMBER.match(word):
        return False
    if len(word) == 1 and word.isupper():
        # An initial, unless an unmistakable start follows ("Henry V. She …"); "A" and "I" may be initials themselves.
        return len(following) > 1 and _is_starter(line, match)
    if lower in _NEVER_LAST:
        return False
    if lower in _BEFORE_NUMBER:
        return not (following[0].isdigit() or _ROMAN.match(following))
    if lower in _SOMETIMES_LAST or _ACRONYM.match(word):
        return _is_starter(line, match)
    if _ORDINAL.match(word):  # "3. Oktober", "Friedrich II. König"
        is_german = following.lower() in _GERMAN_DATES or _is_german(line, match)
        return not is_german or _is_starter(line, match)
    return True

"""Sentences of running text by rule: no model, no download, one look at every stop.

A line end is a paragraph end, and so a sentence end (hard-wrapped text must be joined first). Inside a paragraph a
sentence ends at `.`, `!`, `?` or an ellipsis, with the quotes and brackets that close behind it, unless what stands
around says otherwise: an abbreviation, an initial, a decimal, a list number, a lower-case continuation. An
abbreviation that often ends a sentence ("Inc.", "U.S.", "p.m.") does so only before a word that usually starts one,
the idea of Kiss and Strunk's Punkt (2006) with fixed instead of learned lists.
"""

from __future__ import annotations

import re

_CLOSING = "\"'”’»›)\\]}"
_OPENING = "\"'“‘«‹(\\[{¿¡"

# Every repetition below that can fail is bounded, or entered once a run: the time stays linear in the text.
_STOP = re.compile("[.!?…‽。！？｡]")  # one class: the scan for it is most of the work
_STOPS = re.compile("[.!?…‽]+|[。！？｡]+")
_BEHIND_STOP = re.compile(
    rf"""
    (?P<stop> (?:\.[ ]){{1,8}}\.+ | [.!?…‽]+ )     # one stop, a run of them, or a spaced ellipsis
    (?P<close> [{_CLOSING}]{{0,8}} )
    (?: \[\d{{1,3}}\] ){{0,8}}                    # reference marks
    \s+
    (?= (?P<open> [{_OPENING}]{{0,8}} ) (?P<next> \w+ | \S ) )
    |
    [。！？｡]+ [」』”’）】〉》]* \s*              # no space is needed where none is written
    """,
    re.VERBOSE,
)
_LINES = re.compile(r"[\n\r\v\f\x85\u2028\u2029]+")
_WORD_EDGE = re.compile(r"[\s(\[{\"'“‘«‹/—–]")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEVER_LAST = _words("""
    mr mrs ms mx messrs mme mlle dr drs prof rev revd fr hon gov sen rep reps sens pres gen lt col maj capt cpt cmdr
    comdr adm sgt cpl pvt brig supt insp det atty mt st ste vs v cf viz i.e e.g eg ie approx circa eds trans transl
    ibid incl excl esp a.k.a née univ assn bldg natl intl hwy rte bros
""")
"""Abbreviations that stand before what they belong to, so hardly ever at the end of a sentence."""

_BEFORE_NUMBER = _words("""
    no nos nr p pp pg pgs vol vols fig figs eq eqs sec secs ch chap chaps chs app art arts par pars para paras pt pts
    b c ca d r ed op jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat sun
""")
"""Abbreviations before a number (a numeral, a date); otherwise they are words."""

_SOMETIMES_LAST = _words("""
    inc ltd corp co cos llc llp plc jr sr esq etc al a.m p.m ph.d b.sc m.sc d.phil m.phil ll.d ave blvd dept ft est
    gmbh rd tr resp
""")
"""Abbreviations that may also end a sentence: the next word decides (as after any acronym with full stops)."""

_STARTERS = _words("""
    a about according after afterwards all also although among an and another any are as at because before both but by
    despite did do does during each even every few first following for from further he hence her here hers his how
    however i if in instead is it its just later like many meanwhile moreover most my neither nevertheless no nobody
    none nonetheless nor not nothing now of on once one only or other others our over perhaps several she similarly
    since so some soon still such than that the their then there therefore these they this those though through thus
    to today together two under unlike until upon was we were what whatever when where whether which while who whoever
    why with within without yet you your
""")
"""Words (capitalised in the text) that usually start a sentence rather than continue a name."""

_ROMAN = re.compile(r"[IVXLC]+$")
_ACRONYM = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]$")
_LIST_NUMBER = re.compile(r"(?:\d{1,3}|[A-Za-z]|[ivxIVX]{1,4})$")
_SYMBOLS = frozenset("$£€#@*•~+§")


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """The sentences of `text`, stripped, none empty; without white space they add up to `text`.

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
    """Append the sentences of one paragraph; False where it is blank."""
    count = len(sentences)
    start = position = 0
    while (stop := _STOP.search(line, position)) is not None:
        match = _BEHIND_STOP.match(line, stop.start())
        if match is None:
            position = _STOPS.match(line, stop.start()).end()  # type: ignore[union-attr]
            continue
        position = match.end()
        if match.group("stop") is None or _is_boundary(line, start, match):
            sentence = line[start:position].strip()
            if sentence:
                sentences.append(sentence)
            start = position
    rest = line[start:].strip()
    if rest:
        sentences.append(rest)
    return len(sentences) > count


def _is_boundary(line: str, start: int, match: re.Match[str]) -> bool:
    """Whether the sentence that began at `start` ends at this match."""
    stop, following = match.group("stop"), match.group("next")
    first = following[0]
    if first.islower():
        return False
    if not first.isalnum() and not match.group("open"):
        return first in _SYMBOLS
    if "…" in stop or (len(stop) > 1 and not stop.strip(". ")):
        return bool(match.group("close")) or _is_starter(following)
    if stop != ".":
        return True
    word = _last_word(line[max(start, match.start() - 40) : match.start()])
    if match.group("close") or not word:
        return not (word.lower() in _NEVER_LAST and not _is_starter(following))
    before = match.start() - len(word)
    return _word_ends_sentence(word, following, before - start < 8 and not line[start:before].strip(" \t(["))


def _last_word(text: str) -> str:
    word = text[text.rfind(" ") + 1 :]
    if word.isalnum():
        return word
    return _WORD_EDGE.split(text)[-1].strip(_CLOSING)


def _is_starter(word: str) -> bool:
    return word.lower() in _STARTERS


def _word_ends_sentence(word: str, following: str, is_first: bool) -> bool:
    """Whether a full stop between `word` and `following` ends the sentence; `is_first`: the word opens its line."""
    lower = word.lower()
    if is_first and _LIST_NUMBER.match(word):
        return False
    if len(word) == 1 and word.isupper():
        # An initial, unless an unmistakable start follows ("Henry V. She …"); "A" and "I" may be initials themselves.
        return len(following) > 1 and _is_starter(following)
    if lower in _NEVER_LAST:
        return False
    if lower in _BEFORE_NUMBER:
        return not (following[0].isdigit() or _ROMAN.match(following))
    if lower in _SOMETIMES_LAST or _ACRONYM.match(word):
        return _is_starter(following)
    return True

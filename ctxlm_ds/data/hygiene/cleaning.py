"""Cleaning rules: each takes something out of a text. A data recipe lists them by name, in order."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

SENTENCE_ENDS = ".!?…:;。！？；؟؛۔।॥։።༎\"'”’»」』）)"
"""Last characters of a line of prose. Headings, list items and table cells end otherwise."""
_C4_LINE_ENDS = (".", "!", "?", '"')
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_BOILERPLATE = re.compile(
    r"(?i)^\W*(advertisement|sponsored( content)?|share (this|on|via)\b.*|follow us\b.*|click here\b.*|read more\b.*"
    r"|sign up\b.*newsletter.*|subscribe\b.*|(copyright\b|©).*|all rights reserved.*|related (articles?|stories|posts)"
    r"|photo( credit)?:.*|image( credit)?:.*|\(?reporting by\b.*|\(?editing by\b.*)\W*$"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060\ufeff\ufffe\uffff]")
_BLANKS = re.compile(r"[ \t\u00a0\u2000-\u200a\u202f\u205f\u3000]+")
_TAGS = re.compile(r"</?[A-Za-z][^<>]{0,200}>")
_CITATIONS = re.compile(r"\[(?:\d{0,3}|edit|citation needed)\]")
_GUTENBERG_START = re.compile(r"(?im)^\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG.*$")
_GUTENBERG_END = re.compile(r"(?im)^\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG.*$")
_GPT_CHARACTERS = str.maketrans({"—": "-", "–": "-", "―": "-", "…": "...", "´": "'"})
_GPT_RUNS = re.compile(r"([-~!\";?+,()/*\[\]{}|_])\1*")
_WIKI_TAIL = frozenset(
    heading.strip().casefold()
    for heading in """
    See also|References|Notes|Footnotes|External links|Further reading|Bibliography|Sources|Citations|Works cited
    Siehe auch|Einzelnachweise|Weblinks|Literatur|Anmerkungen|Quellen
    Voir aussi|Notes et références|Références|Liens externes|Bibliographie|Articles connexes
    Véase también|Referencias|Enlaces externos|Bibliografía|Notas
    Voci correlate|Note|Altri progetti|Collegamenti esterni|Bibliografia
    Ver também|Referências|Ligações externas|Zie ook|Bronnen, noten en/of referenties|Externe links|Externe link
    См. также|Примечания|Литература|Ссылки|Див. також|Примітки|Посилання|Джерела
    Zobacz też|Przypisy|Linki zewnętrzne|Se även|Referenser|Externa länkar|Källor
    関連項目|脚注|外部リンク|参考文献|出典|参见|外部链接|注释|같이 보기|각주|외부 링크
    انظر أيضا|مراجع|وصلات خارجية
    """.strip()
    .replace("\n", "|")
    .split("|")
)
"""Headings of the first section after the text of an encyclopedia's article."""


def _control_characters(text: str) -> str:
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _whitespace(text: str) -> str:
    lines = [_BLANKS.sub(" ", line).strip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _markup(text: str) -> str:
    """Remove comments by searching: a regular expression would search to the end from each opening."""
    pieces = []
    place = 0
    while (start := text.find("<!--", place)) >= 0 and (end := text.find("-->", start + 4)) >= 0:
        pieces.append(text[place:start])
        place = end + 3
    return html.unescape(_TAGS.sub("", "".join((*pieces, text[place:]))))


def _wiki_tail(text: str) -> str:
    lines = text.split("\n")
    tails = (number for number, line in enumerate(lines) if number and line.strip(" =").casefold() in _WIKI_TAIL)
    end = next(tails, None)
    return text if end is None else "\n".join(lines[:end]).rstrip()


def _prose_lines(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.strip() or line.rstrip()[-1] in SENTENCE_ENDS)


def _boilerplate_lines(text: str) -> str:
    return "\n".join(
        line
        for line in text.split("\n")
        if len(line) >= 200 or not (_BOILERPLATE.match(line) or any(phrase in line.lower() for phrase in _POLICY))
    )


def _c4_lines(text: str) -> str:
    """Apply C4's line rules (Raffel et al. 2020, JMLR 21(140), section 2.2)."""
    lines = [_CITATIONS.sub("", line).strip() for line in text.split("\n")]
    complete = [line for line in lines if line.endswith(_C4_LINE_ENDS) and not line.endswith("...")]
    long = [line for line in complete if len(line.split()) >= 5]
    return "\n".join(line for line in long if not any(word in line.lower() for word in ("javascript", *_POLICY)))


def _gutenberg(text: str) -> str:
    start, end = _GUTENBERG_START.search(text), _GUTENBERG_END.search(text)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip("\n")


def _join_lines(text: str) -> str:
    paragraphs = re.split(r"\n[ \t]*\n\s*", text)
    return "\n".join(" ".join(line.strip() for line in paragraph.split("\n")).strip() for paragraph in paragraphs)


def _gpt_standard(text: str) -> str:
    """Standardize as GPT's released code before its words (openai/finetune-transformer-lm, text_utils.py).

    It knows no backslash: its pattern of one means a plus.
    """
    text = _GPT_RUNS.sub(r" \g<0> ", text.translate(_GPT_CHARACTERS))
    return re.sub(r"\s*\n\s*", " \n ", re.sub(r"[^\S\n]+", " ", text)).strip()


def _fix_text(text: str) -> str:
    """Repair wrongly decoded characters, entities and quotes, as GPT's released code does first."""
    import ftfy

    return str(ftfy.fix_text(text))


def _gpt_words(text: str) -> str:
    """Write GPT's words, lower-cased, with a space between them; a line end is a word."""
    words = (word.text.strip(" ").lower() for word in _english_words()(text))
    return " ".join(word for word in words if word)


@lru_cache(maxsize=1)
def _english_words() -> Any:
    """Return spaCy's tokenizer for English, which is rules without a model."""
    import spacy

    return spacy.blank("en").tokenizer


RULES: dict[str, Callable[[str], str]] = {
    rule.__name__[1:]: rule
    for rule in (
        _control_characters, _nfc, _whitespace, _markup, _wiki_tail, _prose_lines, _boilerplate_lines, _c4_lines,
        _gutenberg, _join_lines, _fix_text, _gpt_standard, _gpt_words,
    )
}  # fmt: skip
PACKAGES = {"fix_text": "ftfy", "gpt_words": "spacy"}
"""The optional package that a rule needs."""


def clean(text: str, rules: Sequence[str]) -> tuple[str, list[int]]:
    """Return the text after all rules, and the number of characters that each removed."""
    removed = []
    for rule in rules:
        before = len(text)
        text = RULES[rule](text)
        removed.append(before - len(text))
    return text, removed

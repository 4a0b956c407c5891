"""Cleaning rules: each takes something out of a text, by name, in the order that a data recipe lists them.

In: a text and names of rules. Out: the text without headings, markup, boilerplate, line wraps, ... and how many
characters each rule took. Not here: which texts are dropped whole (quality.py).
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence

SENTENCE_ENDS = ".!?…:;。！？；؟؛۔।॥։።༎\"'”’»」』）)"
"""What closes a line of prose; a heading, a list item or a table cell has none of them."""
_C4_LINE_ENDS = (".", "!", "?", '"')
_C4_MIN_WORDS = 5
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
"""Headings at which an encyclopedia's article ends and its apparatus begins."""


def _control_characters(text: str) -> str:
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def _whitespace(text: str) -> str:
    lines = [_BLANKS.sub(" ", line).strip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _markup(text: str) -> str:
    return html.unescape(_TAGS.sub("", _without_comments(text)))


def _without_comments(text: str) -> str:
    """By searching, not by an expression: one that is never closed would be searched to the end from each opening."""
    pieces = []
    place = 0
    while (start := text.find("<!--", place)) >= 0 and (end := text.find("-->", start + 4)) >= 0:
        pieces.append(text[place:start])
        place = end + 3
    return "".join((*pieces, text[place:]))


def _wiki_tail(text: str) -> str:
    """Ends the article at its first heading of references, links and the like after the opening."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if number and line.strip(" =").casefold() in _WIKI_TAIL:
            return "\n".join(lines[:number]).rstrip()
    return text


def _prose_lines(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.strip() or line.rstrip()[-1] in SENTENCE_ENDS)


def _boilerplate_lines(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not _is_boilerplate(line))


def _is_boilerplate(line: str) -> bool:
    return len(line) < 200 and (
        _BOILERPLATE.match(line) is not None or any(phrase in line.lower() for phrase in _POLICY)
    )


def _c4_lines(text: str) -> str:
    """C4's line rules (Raffel et al. 2020, JMLR 21(140), section 2.2)."""
    kept = []
    for line in text.split("\n"):
        line = _CITATIONS.sub("", line).strip()
        if not line.endswith(_C4_LINE_ENDS) or line.endswith("...") or len(line.split()) < _C4_MIN_WORDS:
            continue
        lowered = line.lower()
        if "javascript" in lowered or any(phrase in lowered for phrase in _POLICY):
            continue
        kept.append(line)
    return "\n".join(kept)


def _gutenberg(text: str) -> str:
    start, end = _GUTENBERG_START.search(text), _GUTENBERG_END.search(text)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip("\n")


def _join_lines(text: str) -> str:
    """Blank lines part paragraphs; single line ends are wraps."""
    paragraphs = re.split(r"\n[ \t]*\n\s*", text)
    return "\n".join(" ".join(line.strip() for line in paragraph.split("\n")).strip() for paragraph in paragraphs)


RULES: dict[str, Callable[[str], str]] = {
    "control_characters": _control_characters,
    "whitespace": _whitespace,
    "markup": _markup,
    "wiki_tail": _wiki_tail,
    "prose_lines": _prose_lines,
    "boilerplate_lines": _boilerplate_lines,
    "c4_lines": _c4_lines,
    "gutenberg": _gutenberg,
    "join_lines": _join_lines,
}
"""Every rule by the name that a data recipe gives it."""


def clean(text: str, rules: Sequence[str]) -> tuple[str, list[int]]:
    """The text after all rules, and the characters that each took (entities resolved count as taken)."""
    removed = []
    for rule in rules:
        before = len(text)
        text = RULES[rule](text)
        removed.append(before - len(text))
    return text, removed

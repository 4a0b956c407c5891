"""The stages that a document passes alone, in one order, in a worker process.

In: chunks of raw records (sources/reading.py), a data recipe. Out: for each chunk the lines of the documents that stay,
with what the duplicate stages need of them, and what was dropped, where and why. Not here: duplicates (duplicates.py),
which the main process decides in order (prepare.py).

Cleaning rules: each takes something out of a text, by name, in the order that a data recipe lists them.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ctxlm_ds.data.hygiene.corpora import CorpusRecipe, CorpusSource
from ctxlm_ds.data.hygiene.duplicates import fingerprint, signatures
from ctxlm_ds.data.hygiene.held_out import open_held_out_table, shares_ngram
from ctxlm_ds.data.hygiene.quality import (
    LanguageIdentifier,
    c4_reason,
    character_reason,
    gopher_reason,
    language_reason,
    length_reason,
    repetition_reason,
)
from ctxlm_ds.data.hygiene.record import EMPTY_STAGE, EXCERPT_CHARACTERS, Dropped, Kept, StagedChunk, active_stages
from ctxlm_ds.data.hygiene.words import Hashes, count_words, word_hashes
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.types import BadRecord, Chunk, Document


class ChunkStager:
    """Cleans and filters one chunk at a time."""

    def __init__(self, recipe: CorpusRecipe, held_out_table: Path | None) -> None:
        self.recipe = recipe
        self.filters = recipe.filters
        self.stages = active_stages(recipe.filters)
        self._identifier = LanguageIdentifier(recipe.filters.languages) if "language" in self.stages else None
        self._held_out = open_held_out_table(held_out_table) if held_out_table else None
        self._needs_words = bool({"decontamination", "exact_duplicates", "near_duplicates"} & set(self.stages))

    def __call__(self, item: tuple[int, Chunk]) -> StagedChunk:
        number, chunk = item
        source = self.recipe.sources[number]
        result = StagedChunk(number, chunk.path, chunk.bytes_read)
        kept_words: list[Hashes] = []
        for position, document in self._documents(chunk, source, result):
            words = self._judge(document, position, source, result)
            if words is not None:
                kept_words.append(words)
        if "near_duplicates" in self.stages:
            shingle = self.filters.near_duplicate_shingle
            result.signatures = signatures(kept_words, shingle, self.filters.near_duplicate_permutations)
        return result

    def _documents(self, chunk: Chunk, source: CorpusSource, result: StagedChunk) -> Iterator[tuple[int, Document]]:
        """Number of the first record and text of each document; rows are joined where the source says so."""
        rows: list[Document] = []
        first = 0
        for position, document in enumerate(parse_chunk(chunk, source.json_keys)):
            result.records += 1
            if isinstance(document, BadRecord):
                result.bad_records.append(document)
                continue
            if not source.join_rows:
                yield position, document
                continue
            first = first if rows else position
            rows.append(document)
            if len(rows) == source.join_rows:
                yield first, _joined(rows)
                rows = []
        if rows:
            yield first, _joined(rows)

    def _judge(self, document: Document, position: int, source: CorpusSource, result: StagedChunk) -> Hashes | None:
        """Keep or drop a document; its words (empty where no later stage needs them) if it is kept."""
        key, *others = source.json_keys
        text = document[key]
        num_words = count_words(text)
        result.read.add(num_words, len(text.encode("utf-8")), documents=bool(num_words))
        if source.clean:
            text, removed = clean(text, source.clean)
            result.removed_characters.update(dict(zip(source.clean, removed, strict=True)))
            num_words = count_words(text)
        words = word_hashes(text)[0] if self._needs_words else np.empty(0, dtype=np.uint64)
        stage, reason = self._verdict(text, num_words, words)
        if stage:
            excerpt = text[:EXCERPT_CHARACTERS]
            result.dropped.append(Dropped(stage, reason, num_words, position, excerpt))
            return None
        record = {"text": text} | {other: document[other] for other in others}
        line = json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
        print_ = fingerprint(text, words) if "exact_duplicates" in self.stages else b""
        result.kept.append(Kept(line, position, num_words, len(text.encode("utf-8")), print_, len(words) > 0))
        return words

    def _verdict(self, text: str, num_words: int, words: Hashes) -> tuple[str, str]:
        """(stage, reason) that drops the text, or two empty strings."""
        if not num_words:
            return EMPTY_STAGE, "no text"
        for stage in self.stages:
            reason = self._reason(stage, text, num_words, words)
            if reason:
                return stage, reason
        return "", ""

    def _reason(self, stage: str, text: str, num_words: int, words: Hashes) -> str | None:
        filters = self.filters
        if stage == "length":
            return length_reason(text, num_words, filters)
        if stage == "characters":
            return character_reason(text, filters)
        if stage == "gopher_quality":
            return gopher_reason(text, check_stop_words=not filters.languages or "en" in filters.languages)
        if stage == "gopher_repetition":
            return repetition_reason(text)
        if stage == "c4_quality":
            return c4_reason(text)
        if self._identifier is not None and stage == "language":
            return language_reason(text, self._identifier, filters.languages, filters.min_language_confidence)
        if self._held_out is not None and stage == "decontamination":
            size = filters.decontamination_ngram
            return f"shares {size} words in a row" if shares_ngram(words, size, self._held_out) else None
        return None


def _joined(rows: list[Document]) -> Document:
    return {key: "\n".join(row[key] for row in rows) for key in rows[0]}


def build_stager(recipe: CorpusRecipe, held_out_table: Path | None) -> ChunkStager:
    """A ChunkStager in a worker process."""
    return ChunkStager(recipe, held_out_table)


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

"""The stages that a document passes alone, in one order, in a worker process.

In: chunks of raw records (sources/reading.py), a data recipe. Out: for each chunk the lines of the documents that stay,
with what the duplicate stages need of them, and what was dropped, where and why. Not here: duplicates (duplicates.py),
which the main process decides in order (prepare.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ctxlm_ds.data.hygiene.cleaning import clean
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
from ctxlm_ds.data.sources.reading import BadRecord, Chunk, Document, parse_chunk


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

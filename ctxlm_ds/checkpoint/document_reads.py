"""When the weights of a checkpoint read a document: its ledger's rows, read by the code that training reads them with.

A sample format copies ranges of tokens. So it copies the places of a document's tokens from the same ranges, if a
dataset holds these in place of its tokens (as the flags of given spans in data/index/index.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.checkpoint.ledger import Segment
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.index.build import IndexPlace
from ctxlm_ds.data.index.index import RowSource, SampleIndex
from ctxlm_ds.data.index.sentence_table import ends_with_eod, is_split
from ctxlm_ds.data.numba_random import Permutation
from ctxlm_ds.data.preprocess.config import PreprocessConfig
from ctxlm_ds.data.preprocess.encode import ChunkEncoder
from ctxlm_ds.data.sample import NO_LANGUAGE
from ctxlm_ds.data.stream.run_datasets import train_parts
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.base import Tokenizer

TOKENS_AT_ONCE = 1 << 22
Touched = dict[int, list[tuple[NDArray[np.int64], bool]]]
"""The `places` and `second` of Read, by row of an index for each of its sequences that has any."""


class Read(NamedTuple):
    """A sequence with tokens of a document, in a row that was read."""

    segment: int
    epoch: int
    position: int
    step: int | None
    places: NDArray[np.int64]
    """[n] tokens of the document, from 0, without an end-of-document token."""
    second: bool
    """True if all are in a second segment (BERT's random next segment, if the first is of another document)."""


def document_reads(
    segments: Sequence[Segment], dataset: IndexedDataset, documents: Sequence[int], tokenizer: Tokenizer
) -> Iterator[Read]:
    """Yield each time that one of some documents of equal tokens was read, in the order of the segments.

    Raises DataError if no source is this dataset, it has no such document, or a dataset or sample index has moved or
    changed.
    """
    if not all(0 <= number < dataset.num_documents for number in documents):
        raise DataError(f"{dataset.prefix}: has documents 0 to {dataset.num_documents - 1}, not {documents[0]}")
    for number, place in places_of(segments, dataset):
        index = _marked(segments[number], place, dataset, documents, tokenizer)
        yield from _reads(number, segments[number], place, lru_cache(maxsize=2)(partial(_touched, index)))


def places_of(segments: Sequence[Segment], dataset: IndexedDataset) -> list[tuple[int, int]]:
    """Return segment and source of each source that is this dataset. Raises DataError if none is."""
    sources = {(number, place): source for number, segment in enumerate(segments)
               for place, source in enumerate(segment.sources)}  # fmt: skip
    # A ledger that is computed from state.json has no fingerprints, but the key of an index depends on them.
    marks = {at: source.get("fingerprint") or (dataset.fingerprint if source["path"] == dataset.prefix else "unknown")
             for at, source in sources.items()}  # fmt: skip
    if found := [at for at, mark in marks.items() if mark == dataset.fingerprint]:
        return found
    known = ", ".join(dict.fromkeys(f"{source['path']} ({marks[at][:12]})" for at, source in sources.items()))
    mark = dataset.fingerprint[:12]
    raise DataError(f"{dataset.prefix}: its fingerprint {mark} is that of no source of the ledger: {known}")


def _reads(number: int, segment: Segment, place: int, touched: Callable[[int], Touched]) -> Iterator[Read]:
    before = sum(source["rows"] for source in segment.sources[:place])
    found: list[tuple[int, int, NDArray[np.int64], bool]] = []
    for positions in segment.positions(segment.first):
        planned = segment.stream.at(positions)
        rows = planned.rows - before
        for epoch in np.unique(planned.epochs).tolist():
            held = touched(epoch if segment.config.data.in_lanes else 0)
            for hit in np.flatnonzero((planned.epochs == epoch) & np.isin(rows, list(held))).tolist():
                found += [(epoch, int(positions[hit]), *each) for each in held[int(rows[hit])]]
    steps = segment.steps_at([position for _, position, *_ in found])
    for (epoch, position, places, second), step in zip(found, steps, strict=True):
        yield Read(number, epoch, position, step, places, second)


def _marked(
    segment: Segment, source: int, dataset: IndexedDataset, documents: Sequence[int], tokenizer: Tokenizer
) -> SampleIndex:
    """Open the index of a source, whose tokens are 1 + the place in the document, and 0 outside of the documents."""
    place = IndexPlace.of(train_parts(segment.config.data)[source], tokenizer, segment.config.row_settings)
    own, recorded, template = place.dataset, segment.sources[source]["index"], SequenceTemplate.of(tokenizer)
    if place.key != recorded:
        raise DataError(
            f"{own.prefix}: gives samples {place.key[:12]} now, the weights read {recorded[:12]}: the dataset or the "
            "tokenizer was replaced; put back those of the run"
        )
    numbers = np.array(documents, dtype=np.int64)
    if own.fingerprint != dataset.fingerprint:  # the copy of data.split_seed, in another order
        order = Permutation(own.num_documents, int(segment.config.data.split_seed or 0), "split")
        numbers = np.flatnonzero(np.isin(order[np.arange(own.num_documents)], numbers))
    marks, ends = np.zeros(own.num_tokens, dtype=np.int32), ends_with_eod(own, template.sep_id)
    for number in numbers.tolist():
        first, after = own.first_tokens(own.document_indices[number : number + 2]).tolist()
        marks[first : after - ends] = np.arange(1, after - ends - first + 1)
    marked = own.with_tokens(marks)
    marked.metadata = {"split_sentences": is_split(own), "append_eod": ends}
    unmarked = template._replace(cls_id=0, sep_id=0, pad_id=0, vocab_size=np.iinfo(np.int32).max)
    return SampleIndex(place.directory, marked, unmarked, place.key, NO_LANGUAGE)


def _touched(index: SampleIndex, epoch: int) -> Touched:
    found: Touched = {}
    size = max(1, TOKENS_AT_ONCE // index.meta["settings"]["seq_length"])
    for begin in range(0, len(index), size):
        rows = np.arange(begin, min(begin + size, len(index)))
        samples, row_starts = RowSource([index]).samples(rows, np.full(len(rows), epoch))
        hits = np.flatnonzero(samples.input_ids)
        sequences = np.searchsorted(samples.starts, hits, side="right") - 1
        for sequence in np.unique(sequences).tolist():
            own = hits[sequences == sequence]
            row = begin + int(np.searchsorted(row_starts, sequence, side="right")) - 1
            second = (own - samples.starts[sequence] >= samples.second_starts[sequence]).all()
            is_second = index.format.makes_pairs and bool(second)
            found.setdefault(row, []).append((samples.input_ids[own].astype(np.int64) - 1, is_second))
    return found


def documents_of_text(dataset: IndexedDataset, text: str, tokenizer: Path) -> list[int]:
    """Return the documents whose tokens are those of a text, encoded as the dataset was made."""
    made = dataset.metadata or {"split_sentences": is_split(dataset)}
    names = ("split_sentences", "keep_newlines", "append_eod", "prepend_bos", "split_special_tokens")
    settings: dict[str, Any] = {name: bool(made.get(name)) for name in names}
    encoder = ChunkEncoder(tokenizer, PreprocessConfig(leading_space=bool(made.get("sentence_prefix")), **settings))
    tokens = encoder.encode([text.removesuffix("\n")]).tokens
    lengths, found = dataset.document_tokens(0, dataset.num_documents), []
    for number in np.flatnonzero(lengths == len(tokens)).tolist():
        first, after = dataset.first_tokens(dataset.document_indices[number : number + 2]).tolist()
        found += [number] if np.array_equal(dataset.tokens[first:after], tokens) else []
    return found

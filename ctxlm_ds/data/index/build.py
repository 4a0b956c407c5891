"""Building and opening the sample index of a dataset (index.py describes its files).

An index appears complete or not at all; several processes may build the same one at the same time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.formats.base import MadeSamples, Making, SampleFormat, SequenceTemplate
from ctxlm_ds.data.index.index import RowSource, SampleIndex
from ctxlm_ds.data.index.record import INDEX_VERSION, SAMPLE_DTYPE, SampleSettings, Source, SourcePart, sample_settings
from ctxlm_ds.data.index.sentence_table import in_order, is_split
from ctxlm_ds.data.index.storage import META_NAME, NpyAppender, build_once, open_array, verify_files, write_meta
from ctxlm_ds.data.numba_random import Permutation, compiled
from ctxlm_ds.data.sample import NO_LANGUAGE
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.sections import DataSection, RowSettings
from ctxlm_ds.registry import FORMATS
from ctxlm_ds.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from ctxlm_ds.objectives.base import Objective

INDEX_FORMAT = "ctxlm_ds-samples"
FEWEST_DOCUMENTS = 300
DOCUMENTS_PER_ROW = 10
WINDOW_SAMPLES = 1 << 16
PACKING_PURPOSE = "packing"
Verify = Literal["all", "changed", "none"]
"""Files of an index to compare with their checksums; `changed` leaves out those that verify_files trusts."""


@dataclass(frozen=True)
class IndexPlace:
    """A source, the settings of its index, and the folder of the index."""

    dataset: IndexedDataset
    documents: tuple[int, int]
    """First document, and the one after the last."""
    settings: SampleSettings
    directory: Path
    key: str
    language: int = NO_LANGUAGE
    """Token of the language of its rows."""

    @classmethod
    def of(cls, part: Source, tokenizer: Tokenizer, wanted: RowSettings, held_out: bool = False) -> IndexPlace:
        """Return the place of the index that holds the wanted rows of a source.

        Raises DataError if the dataset is missing, damaged, made for another tokenizer or other rows, or lacks these
        documents; ConfigError if the tokenizer lacks the token of the language.
        """
        part = part if isinstance(part, SourcePart) else SourcePart(str(part))
        dataset = IndexedDataset(part.prefix)
        require_encoding(dataset, tokenizer, wanted.data)
        if wanted.objective.needs_spans and not dataset.has_spans:
            raise DataError(
                f"{part.prefix}: gives no spans, which this objective masks (objective.spans); run "
                "ctxlm preprocess again with --spans-key"
            )
        documents = (0, dataset.num_documents) if part.documents is None else part.documents
        if not 0 <= documents[0] <= documents[1] <= dataset.num_documents:
            raise DataError(
                f"{part.prefix}: documents {documents[0]} to {documents[1]} are asked for, it has "
                f"{dataset.num_documents}"
            )
        settings = sample_settings(wanted, held_out)
        key = settings.key(dataset.fingerprint, documents, tokenizer.fingerprint)
        prefix, parent = Path(dataset.prefix), wanted.data.sample_index_dir
        directory = (Path(parent) if parent else prefix.parent) / f"{prefix.name}.samples-{key[:12]}"
        return cls(dataset, documents, settings, directory, key, language_id(part.language, tokenizer))

    def open(self, tokenizer: Tokenizer) -> SampleIndex:
        return SampleIndex(self.directory, self.dataset, SequenceTemplate.of(tokenizer), self.key, self.language)

    def make(self, tokenizer: Tokenizer, workers: int = 1) -> MadeSamples:
        """Make the samples, while they are read; raises what SampleFormat.make raises."""
        sample_format: SampleFormat = FORMATS.get(self.settings.sample_format)()
        template = SequenceTemplate.of(tokenizer)
        return sample_format.make(Making(self.dataset, self.documents, self.settings, template, workers))


def language_id(language: str | None, tokenizer: Tokenizer) -> int:
    """Return the id of a language's token (NO_LANGUAGE for None), or raise a ConfigError if there is none."""
    if language is None:
        return NO_LANGUAGE
    token_id = tokenizer.token_to_id(language)
    if token_id is None or token_id not in tokenizer.special_ids:
        raise ConfigError(
            f"data: the tokenizer has no special token {language}, which a source names as its language; train it with "
            f"ctxlm tokenizer --special-tokens {language} ..., or name a token that it has"
        )
    return token_id


def require_encoding(dataset: IndexedDataset, tokenizer: Tokenizer, data: DataSection) -> None:
    """Raise DataError for a dataset of another tokenizer, or whose sentences have the space before them for other rows.

    Megatron's datasets record neither.
    """
    metadata = dataset.metadata or {}
    made_with, space = metadata.get("tokenizer_fingerprint"), metadata.get("sentence_prefix")
    if made_with is not None and made_with != tokenizer.fingerprint:
        raise DataError(
            f"{dataset.prefix}: made with another tokenizer (fingerprint {made_with[:12]}, the recipe's is "
            f"{tokenizer.fingerprint[:12]}); set tokenizer.path to that one, or run ctxlm preprocess again"
        )
    joins_sentences = FORMATS.get(data.sample_format)().joins_sentences(data)
    # Sentences of other makers' tokenizers were encoded without it until 0.1, also for rows that join them.
    space = None if not space and tokenizer.kind == Tokenizer.kind else space
    if space is None or not tokenizer.sentence_prefix or not is_split(dataset) or joins_sentences == bool(space):
        return
    encoded, option = ("with", "without") if space else ("without", "with")
    need = "joins sentences" if joins_sentences else "ends each sentence with a separator"
    raise DataError(
        f"{dataset.prefix}: its sentences were encoded {encoded} the space before them, but data.sample_format "
        f"{data.sample_format} {need}; run ctxlm preprocess again {option} --leading-space, or set "
        f"data.sample_format full_sentences or doc_sentences with data.separate_sentences {str(not space).lower()}"
    )


def build_rows(
    parts: Sequence[Source],
    tokenizer: Tokenizer,
    settings: RowSettings,
    *,
    held_out: bool = False,
    workers: int | None = None,
    verify: Verify = "all",
) -> RowSource:
    """Open the sample indexes of sources as one row space, building those that do not exist.

    A `held_out` set has a fixed seed, one pass and no static masks. `workers` are threads, by default the processor
    cores that this process may use; the files do not depend on them. `verify` says which files of an index that another
    process has built are compared with their checksums.

    Raises DataError if a dataset does not fit the tokenizer or the sample format, an index is damaged, or the disk
    refuses it or lacks room; ConfigError if seq_length is too short for the sample format.
    """
    workers = workers or len(os.sched_getaffinity(0))

    def opened(part: Source) -> SampleIndex:
        place = IndexPlace.of(part, tokenizer, settings, held_out)
        is_own = build_once(place.directory, partial(_write_index, place, tokenizer, workers))
        index = place.open(tokenizer)
        if verify != "none" and not is_own:
            verify_files(index.directory, index.meta, trust=verify == "changed")
        return index

    return RowSource([opened(part) for part in parts])


def _write_index(place: IndexPlace, tokenizer: Tokenizer, workers: int, folder: Path) -> None:
    require_room(folder, place)
    counts = _write_samples(folder, place, tokenizer, workers)
    meta = {"format": INDEX_FORMAT, "version": INDEX_VERSION, "key": place.key, "settings": place.settings.to_dict()}
    origin = {"prefix": place.dataset.prefix, "fingerprint": place.dataset.fingerprint}
    write_meta(folder, meta | {"dataset": origin | {"documents": list(place.documents)}} | counts)


def require_room(folder: Path, place: IndexPlace) -> None:
    """Raise DataError if the disk of `folder` lacks room for the least size of an index, by the tokens to cover."""
    settings, (first, after) = place.settings, place.dataset.token_range(place.documents)
    tokens = (after - first) * settings.num_duplicates
    least = tokens // settings.seq_length * SAMPLE_DTYPE.itemsize
    free = shutil.disk_usage(folder).free
    if least > free:
        raise DataError(
            f"{place.directory}: the sample index needs at least {least / 1e9:,.1f} GB "
            f"(data.num_duplicates {settings.num_duplicates}), the disk has {free / 1e9:,.1f} GB; lower "
            "data.num_duplicates, or set data.sample_index_dir to a larger disk"
        )


def _write_samples(directory: Path, place: IndexPlace, tokenizer: Tokenizer, workers: int) -> dict[str, int]:
    """Write samples.npy and, if samples share rows, the rows; return the counts for meta.json."""
    settings, made, num_tokens = place.settings, place.make(tokenizer, workers), 0
    with ExitStack() as stack:
        rows = _RowsFiles(directory, stack) if settings.packing else None
        with NpyAppender(directory / "samples.npy", SAMPLE_DTYPE) as file:
            for records, counts in made.pieces:
                if rows is not None and counts is not None:
                    rows.append(np.arange(file.count, file.count + len(records)), counts)
                file.append(records)
                num_tokens += int(records["num_tokens"].sum(dtype=np.int64))
        if rows is not None and not FORMATS.get(settings.sample_format).forms_rows:
            lengths, most = open_array(directory, "samples")["num_tokens"], settings.max_sequences_per_row
            for numbers, counts in pack_samples(lengths, settings.seq_length, most, settings.seed, workers):
                rows.append(numbers, counts)
    return {
        "documents": made.documents,
        "sentences": made.sentences,
        "samples": file.count,
        "rows": file.count if rows is None else rows.starts.count - 1,
        "tokens": num_tokens,
    }


class _RowsFiles:
    """row_starts.npy and row_samples.npy while they are written."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.starts = stack.enter_context(NpyAppender(directory / "row_starts.npy", np.int64))
        self._samples = stack.enter_context(NpyAppender(directory / "row_samples.npy", np.int64))
        self._last = 0
        self.starts.append(np.zeros(1, dtype=np.int64))

    def append(self, numbers: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Append [n] sample ids, row after row, and [r] how many samples each row has that ends among them."""
        ends = self._last + np.cumsum(counts)
        self._last = int(ends[-1]) if len(ends) else self._last
        self.starts.append(ends)
        self._samples.append(numbers)


@contextmanager
def excerpt(
    prefix: str, tokenizer: Tokenizer, settings: RowSettings, objective: Objective, rows_wanted: int
) -> Iterator[tuple[RowSource, str]]:
    """Yield rows of a dataset to look at, and a line that says of which documents they are.

    They are those of the complete index if that is built, otherwise of the first documents only, from an index in a
    temporary folder.
    """
    language = next((source.language for source in settings.data.train if source.path == prefix), None)
    whole = SourcePart(prefix, language=language)
    place = IndexPlace.of(whole, tokenizer, settings)
    total = place.dataset.num_documents
    if (place.directory / META_NAME).exists():
        rows = RowSource([place.open(tokenizer)])
        objective.read_corpus(rows, settings.seed)
        yield rows, f"rows of all {total:,} documents, from {place.directory}"
        return
    count = min(total, max(FEWEST_DOCUMENTS, DOCUMENTS_PER_ROW * rows_wanted))
    title = f"rows of all {total:,} documents"
    if count < total:
        title = (
            f"rows of only the first {count:,} of {total:,} documents, made as training makes them: a run on all of "
            "them has other rows and masks (ctxlm samples --show shows those)"
        )
    with tempfile.TemporaryDirectory(prefix="samples-") as folder:
        data = settings.data.model_copy(update={"sample_index_dir": folder})
        rows = build_rows([replace(whole, documents=(0, count))], tokenizer, replace(settings, data=data))
        objective.read_corpus(rows, settings.seed)
        yield rows, title


def pack_samples(
    lengths: NDArray[np.integer[Any]], seq_length: int, max_sequences: int, seed: int, workers: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield packed rows of each window: [samples] sample ids, row after row, and [rows] how many samples each row has.

    Best fit, longest first, in windows of a keyed random order, which bound the work and keep rows a mixture of
    documents. The result depends on (lengths, seq_length, max_sequences, seed) only.
    """
    order = Permutation(len(lengths), seed, PACKING_PURPOSE)

    def pack_window(begin: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        samples = order[np.arange(begin, min(begin + WINDOW_SAMPLES, len(lengths)))]
        packed, counts = fit_rows(np.asarray(lengths[samples], dtype=np.int64), seq_length, max_sequences)
        return samples[packed], counts

    return in_order(pack_window, range(0, len(lengths), WINDOW_SAMPLES), workers)


def fit_rows(
    lengths: NDArray[np.int64], seq_length: int, max_sequences: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put each item, longest first, into the fullest row that still has room, else into a new one.

    Return [n] item numbers, row after row in the order of placing, and [rows] items of each row.
    """
    items = np.argsort(-lengths, kind="stable")
    row_of, num_rows = _choose_rows(lengths[items], seq_length, max_sequences)
    return items[np.argsort(row_of, kind="stable")], np.bincount(row_of, minlength=num_rows)


@compiled
def _choose_rows(lengths: Any, seq_length: int, max_sequences: int) -> tuple[Any, int]:
    """Return [n] the row of each item, in the items' order, and the number of rows.

    `newest[r]` is the row with room for r tokens that was touched last, `below[row]` the one beneath it on that stack;
    bit r of `rooms` says that there is one, so that finding the fullest row skips 64 rooms at a time.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    counts = np.zeros(len(lengths), dtype=np.int64)
    below = np.empty(len(lengths), dtype=np.int64)
    newest = np.full(seq_length + 1, -1, dtype=np.int64)
    rooms = np.zeros(seq_length // 64 + 1, dtype=np.uint64)
    num_rows = 0
    for item in range(len(lengths)):
        room = _smallest_room(rooms, lengths[item])
        if room < 0:
            room, row = seq_length, num_rows
            num_rows += 1
        else:
            row = newest[room]
            newest[room] = below[row]
            if newest[room] < 0:
                rooms[room >> 6] ^= np.uint64(1) << np.uint64(room & 63)
        row_of[item] = row
        counts[row] += 1
        left = room - lengths[item]
        if left and counts[row] < max_sequences:
            below[row] = newest[left]
            newest[left] = row
            rooms[left >> 6] |= np.uint64(1) << np.uint64(left & 63)
    return row_of, num_rows


@compiled
def _smallest_room(rooms: Any, least: int) -> int:
    """Return the smallest number from `least` whose bit is set, or -1."""
    word = least >> 6
    bits = rooms[word] >> np.uint64(least & 63) << np.uint64(least & 63)
    while bits == 0:
        word += 1
        if word == len(rooms):
            return -1
        bits = rooms[word]
    room = word << 6
    while not bits & np.uint64(1):
        bits >>= np.uint64(1)
        room += 1
    return room

"""The ledger of a checkpoint: which rows its weights have read, through all their ancestors.

ledger.json has a segment for each contiguous range of rows of one stream. What the rows hold follows from the settings
of the segment and the position, so nothing is stored per row. When the weights read a document is found by the code
that training reads rows with: a sample format copies ranges of tokens, so it copies the places of a document's tokens
from the same ranges, if a dataset holds these in place of its tokens (as the flags of given spans in index.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, find_verified
from ctxlm_ds.checkpoint.saved_state import SOURCES, read_saved_state
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.index.build import IndexPlace
from ctxlm_ds.data.index.index import RowSource, SampleIndex
from ctxlm_ds.data.index.sentence_table import ends_with_eod, is_split
from ctxlm_ds.data.numba_random import Permutation
from ctxlm_ds.data.preprocess.config import PreprocessConfig
from ctxlm_ds.data.preprocess.encode import ChunkEncoder
from ctxlm_ds.data.sample import NO_LANGUAGE
from ctxlm_ds.data.stream.blend import RowStream, stream_of
from ctxlm_ds.data.stream.run_datasets import train_parts
from ctxlm_ds.errors import CheckpointError, DataError
from ctxlm_ds.recipe.load import load_saved_config, saved_settings
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.yaml_source import YamlSource
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.training.loop.state import TrainState

LEDGER_NAME = "ledger.json"
POSITIONS_AT_ONCE = 1 << 20
TOKENS_AT_ONCE = 1 << 22
Touched = dict[int, list[tuple[NDArray[np.int64], bool]]]
"""The `places` and `second` of Read, by row of an index for each of its sequences that has any."""
Range = tuple[int, int]
"""First position of a stream, and the one after the last."""


class Segment(BaseModel):
    """Rows `first` to `after` - 1 of one stream, without those that were skipped or rolled back."""

    model_config = ConfigDict(serialize_by_alias=True)

    run: str
    initialized_from: str | None
    """What the run began with; the weights of a first segment have no ledger."""
    first: int = Field(alias="from")
    after: int = Field(alias="to")
    settings: dict[str, Any]
    """Sections of the recipe that decide the rows and their order."""
    batches: list[tuple[int, int, int, tuple[int, int, int] | None]]
    """Row, the step before it, and from there on training.global_batch_size and batch_ramp."""
    sources: list[dict[str, Any]]
    """Those of RunRows.describe, each with what was `read`: rows and epochs, and by the mean of a row tokens and words,
    exact after complete epochs."""
    skipped: list[Range] = []
    rolled_back: list[Range] = []
    computed: bool = False
    """True if it is of a checkpoint without a ledger: batches that were skipped and the steps are not known."""

    @cached_property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(saved_settings(YamlSource(deepcopy(self.settings)), LEDGER_NAME).data)

    @cached_property
    def stream(self) -> RowStream:
        return stream_of([source["rows"] for source in self.sources], self.config.data, self.config.training)

    def order(self) -> tuple[object, ...]:
        """Return what segments of one stream have in common."""
        data, training = self.config.data, self.config.training
        mix = [(each.weight, each.epochs, each.language) for each in data.train]
        lanes, keys = training.global_batch_size if data.in_lanes else 0, [source["index"] for source in self.sources]
        return training.seed, self.config.objective.name, data.blend, data.temperature, mix, lanes, keys

    def positions(self, first: int) -> Iterator[NDArray[np.int64]]:
        """Yield the positions from `first` on whose gradients were applied, in pieces."""
        for begin in range(first, self.after, POSITIONS_AT_ONCE):
            applied = np.ones(min(POSITIONS_AT_ONCE, self.after - begin), dtype=np.bool_)
            for start, end in (*self.skipped, *self.rolled_back):
                applied[max(0, start - begin) : max(0, end - begin)] = False
            yield begin + np.flatnonzero(applied)

    def steps_at(self, positions: Sequence[int]) -> list[int | None]:
        """Return the step, counted from 1, whose batch holds each position; None if that is not known."""
        starts, steps, back = [self.first], [0], dict(self.rolled_back)
        ends = [*(row for row, *_ in self.batches[1:]), self.after]
        for (row, step, size, ramp), end in zip(self.batches, ends, strict=True):
            training = self.config.training.model_copy(update={"global_batch_size": size, "batch_ramp": ramp})
            while row < end:
                if row not in back:
                    step += 1
                    starts.append(row)
                    steps.append(step)
                row = back.get(row) or row + training.batch_size_at(row)
        places = np.searchsorted(starts, positions, side="right").tolist()
        return [None if self.computed else steps[place - 1] for place in places]

    def up_to(self, state: TrainState) -> Segment:
        """Return the segment once it has grown to the position of `state`."""
        ranges = {"skipped": state.skipped_rows, "rolled_back": state.rolled_back_rows}
        own = {name: [tuple(one) for one in found if one[0] >= self.first] for name, found in ranges.items()}
        grown = self.model_copy(update={"after": state.rows_consumed, **own})
        ends = np.cumsum([source["rows"] for source in self.sources])
        counts = np.zeros(len(ends) + 1, dtype=np.int64)
        for found in grown.positions(self.after):
            rows = self.stream.at(found).rows if len(ends) > 1 else np.zeros_like(found)
            counts += np.bincount(np.searchsorted(ends, rows, side="right"), minlength=len(counts))
        counted = zip(self.sources, counts[:-1].tolist(), strict=True)
        sources = [source | {"read": _read(source, count)} for source, count in counted]
        return grown.model_copy(update={"sources": sources})


def _read(source: Mapping[str, Any], more: int) -> dict[str, float | None]:
    """Return what was read of a source after more rows."""
    rows = source.get("read", {"rows": 0})["rows"] + more
    epochs, tokens, words = rows / max(1, source["rows"]), source.get("tokens"), source.get("words")
    words = None if words is None else round(epochs * words * source["passes"])
    return {"rows": rows, "epochs": epochs, "tokens": tokens and round(epochs * tokens), "words": words}


class Ledger(BaseModel):
    """The file."""

    format: Literal["ctxlm_ds-ledger"] = "ctxlm_ds-ledger"
    version: Literal[1] = 1
    segments: list[Segment]


def open_segment(
    segments: Sequence[Segment], config: RunConfig, data: Mapping[str, Any], rows_consumed: int, step: int = 0
) -> list[Segment]:
    """Return the segments of weights that read on, after `step` steps, at a position of a recipe's stream.

    `data` is RunRows.describe. The last segment continues if it is of this stream and ends there; otherwise an empty
    one is added.
    """
    batches = rows_consumed, step, config.training.global_batch_size, config.training.batch_ramp
    values = {
        "run": str(config.directory),
        "initialized_from": config.initialize_from,
        "from": rows_consumed,
        "to": rows_consumed,
        "settings": config.model_dump(mode="json", include={"data", "objective", "training"}),
        "batches": [batches],
        "sources": data.get(SOURCES, []),
    }
    now = Segment.model_validate(values)
    last = segments[-1] if segments else None
    if last is None or last.after != rows_consumed or last.order() != now.order():
        return [*segments, now]
    sources = [{**before, **source} for before, source in zip(last.sources, now.sources, strict=True)]
    more = [] if last.batches[-1][2:] == batches[2:] else [batches]
    return [*segments[:-1], last.model_copy(update={"sources": sources, "batches": [*last.batches, *more]})]


def read_ledger(folder: Path) -> list[Segment]:
    """Return the segments of a checkpoint; without ledger.json the one that its recipe and state.json give, if any.

    Raises CheckpointError if a file is damaged.
    """
    if (path := folder / LEDGER_NAME).is_file():
        try:
            return Ledger.model_validate_json(path.read_bytes()).segments
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise CheckpointError(f"{path}: damaged or of another version ({where}); use another checkpoint") from None
    if not (described := read_saved_state(folder)):
        return []
    (segment,) = open_segment([], load_saved_config(folder / "config.yaml"), described["data"], 0)
    state = TrainState.from_dict(described["train_state"])
    return [segment.model_copy(update={"computed": True}).up_to(state)]


def write_ledger(folder: Path, segments: list[Segment]) -> None:
    """Write ledger.json, unless it is not known what the weights have read."""
    if segments:
        (folder / LEDGER_NAME).write_text(Ledger(segments=segments).model_dump_json(indent=1), encoding="utf-8")


def join_ledgers(folder: Path, checkpoints: Sequence[Path]) -> None:
    """Write the ledger of weights that are made of those of checkpoints, if each of these has one."""
    found: dict[str, Segment] = {}
    ledgers = list(map(read_ledger, checkpoints))
    for segment in chain(*ledgers):
        key = repr((segment.first, segment.order()))
        if key not in found or found[key].after < segment.after:
            found[key] = segment
    write_ledger(folder, list(found.values()) if all(ledgers) else [])


def first_weights(source: str) -> Path:
    """Return what `initialize_from` names: of a run its newest intact checkpoint. CheckpointError if it has none."""
    return find_verified(Path(source))[0] if (Path(source) / CHECKPOINTS_DIR).is_dir() else Path(source)


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

"""All rows of a run: which documents of which dataset it trains on, which are held out, and their sample indexes.

With `data.split` the documents of a dataset are cut, in their order, into train, valid and test as Megatron cuts them
(blended_megatron_dataset_builder.py): bound i is int(round(sum of the first i shares · documents)). With
`data.split_seed` they are cut by tokens, in a drawn order. Samples are ranges of a dataset's token stream, so the parts
are of a copy in that order, DATASET.shuffled-KEY/DATASET; KEY is a hash of the dataset's fingerprint and the seed.
"""

from __future__ import annotations

import filecmp
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxlm_ds.console import logger
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file
from ctxlm_ds.data.dataset.writer import IndexedDatasetWriter, publish_parts
from ctxlm_ds.data.index.build import Verify, build_rows
from ctxlm_ds.data.index.index import RowSource, SampleIndex
from ctxlm_ds.data.index.record import SourcePart
from ctxlm_ds.data.index.storage import build_once, write_meta
from ctxlm_ds.data.numba_random import Permutation
from ctxlm_ds.data.sample import starts_of
from ctxlm_ds.data.stream.run_plan import words_of
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.sections import DataSection, RowSettings, TrainSource, ValidationSource
from ctxlm_ds.recipe.source_rules import PARTS, source_names, split_shares

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ctxlm_ds.objectives.base import Objective
    from ctxlm_ds.tokenizers.base import Tokenizer

SHUFFLED_FROM = "shuffled_from"
"""Field of a shuffled dataset's JSON: the fingerprint of the original."""
FEWEST_HELD_OUT = 20
"""Fewest documents of a held-out part by split_seed: figures of fewer are of these documents more than of the model."""


@dataclass(frozen=True)
class RunRows:
    """The sample indexes of a run."""

    train: RowSource
    """One index for each of data.train, in its order."""
    validation: Mapping[str, RowSource]

    def describe(self, sources: Sequence[TrainSource], tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the facts that must be the same for a resume to continue the same stream, and those of a ledger.

        `tokens` are those of an epoch, `words` those of the documents (None if they are not counted), `fingerprint` is
        that of the dataset at `path`.
        """
        found = [
            {
                "path": source.path,
                "documents": index.meta["dataset"]["documents"],
                "rows": len(index),
                "index": index.meta["key"],
                "fingerprint": (index.dataset.metadata or {}).get(SHUFFLED_FROM, index.dataset.fingerprint),
                "tokens": index.meta["tokens"],
                "words": words_of(index.dataset, tuple(index.meta["dataset"]["documents"])),
                "passes": index.meta["settings"]["num_duplicates"],
            }
            for source, index in zip(sources, self.train.indexes, strict=True)
        ]
        return {"sources": found, "tokenizer_fingerprint": tokenizer.fingerprint}


def build_run_rows(
    settings: RowSettings,
    tokenizer: Tokenizer,
    objective: Objective,
    workers: int | None = None,
    verify: Verify = "all",
) -> RunRows:
    """Open the sample indexes of the training and held-out sources as build_rows does.

    The objective reads the training rows, if it needs figures of them.

    Raises:
        ConfigError: no training data is named.
        DataError: a dataset or an index is missing, damaged or made with another tokenizer; a training source is a copy
            of another; or held-out documents of a split are trained on.
    """
    data = settings.data
    build = partial(build_rows, tokenizer=tokenizer, settings=settings, workers=workers, verify=verify)
    train = build(train_parts(data))
    refuse_copies(train, data)
    objective.read_corpus(train, settings.seed)
    held_out = {name: build([part], held_out=True) for name, part in held_out_parts(data).items()}
    refuse_overlap(train, held_out, data)
    return RunRows(train, held_out)


def split_documents(num_documents: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Return for each share the first document of its part, and the one after its last."""
    return list(pairwise(round(total * float(num_documents)) for total in accumulate(shares, initial=0.0)))


def draw_part(dataset: IndexedDataset, split: str, seed: int, part: str) -> tuple[NDArray[np.int64], tuple[int, int]]:
    """Return the [documents] in a drawn order and the bounds of a part in it; raise DataError if it has too few."""
    count, shares, number = dataset.num_documents, split_shares(split), PARTS.index(part)
    order = Permutation(count, seed, "split")[np.arange(count)]
    ends = starts_of(dataset.document_tokens(0, count)[order])
    bounds = [int(np.abs(ends - total * ends[-1]).argmin()) for total in accumulate(shares, initial=0.0)]
    first, after = bounds[number : number + 2]
    if number > 0 and shares[number] > 0.0 and after - first < FEWEST_HELD_OUT:
        raise DataError(
            f"{dataset.prefix}: data.split {split} holds out {after - first} of {count} documents for {part}, fewer "
            f"than {FEWEST_HELD_OUT}; cut the text into more documents (plain text: ctxlm preprocess --document "
            "lines:50), hold out a larger share, or name held-out text in data.validation"
        )
    return order, (first, after)


def _shuffled(dataset: IndexedDataset, order: NDArray[np.int64], data: DataSection) -> str:
    """Return the prefix of the copy of a dataset in an order; make the copy unless it exists."""
    original = Path(dataset.prefix)
    key = hashlib.sha256(f"{dataset.fingerprint} {data.split_seed}".encode()).hexdigest()
    final = Path(data.sample_index_dir or original.parent) / f"{original.name}.shuffled-{key[:12]}"

    def fill(folder: Path) -> None:
        prefix = folder / original.name
        with IndexedDatasetWriter(prefix, dataset.dtype, False, folder, with_spans=dataset.has_spans) as writer:
            for number in order.tolist():
                sequences = dataset.arrays.documents[number : number + 2]
                tokens = slice(*dataset.first_tokens(sequences).tolist())
                lengths = dataset.arrays.lengths[slice(*sequences.tolist())]
                marks = dataset.continues_span[tokens] if dataset.has_spans else None
                writer.add_documents(dataset.tokens[tokens], lengths, np.diff(sequences), marks)
            writer.prepare(dataset.metadata and dataset.metadata | {SHUFFLED_FROM: dataset.fingerprint})
        publish_parts(prefix, folder)
        for left in folder.glob("*.part"):
            left.unlink()
        write_meta(folder, {"key": key})

    build_once(final, fill)
    return str(final / original.name)


def train_parts(data: DataSection, copies: bool = True) -> list[SourcePart]:
    """Return the documents of each of data.train; without `copies` as many of the original, for a check.

    Raises ConfigError if no training data is named, DataError if a split leaves one none.
    """
    if not data.train:
        raise ConfigError(
            "data.train is empty: name one or more dataset prefixes made by ctxlm preprocess, e.g. "
            "--set data.train=[data/wiki_text_sentence]"
        )
    return [_part(source, "train", data, copies) for source in data.train]


def held_out_parts(data: DataSection, copies: bool = True) -> dict[str, SourcePart]:
    """Return the held-out documents by name: data.validation, or each training source's valid part of a split."""
    if data.validation or data.split is None:
        return {source.name: _part(source, source.part, data, copies) for source in data.validation}
    parts = {}
    for name, source in zip(source_names(data), data.train, strict=True):
        parts[name] = _part(source, "valid", data, copies, may_be_empty=True)
        if parts[name].is_empty:
            logger.info("data.split %s holds out no document of %s", data.split, source.path)
    return {name: part for name, part in parts.items() if not part.is_empty}


def refuse_copies(train: RowSource, data: DataSection) -> None:
    """Refuse a training source that is a copy of another: its rows would come again with the same masks."""
    seen: dict[str, str] = {}
    for source, index in zip(data.train, train.indexes, strict=True):
        first = seen.setdefault(index.meta["key"], source.path)
        if first is source.path:
            continue
        # Without JSON equal keys say only that the lengths are equal.
        one, other = dataset_file(first, "bin"), dataset_file(source.path, "bin")
        if dataset_file(first, "json").is_file() or filecmp.cmp(one, other, shallow=False):
            raise DataError(
                f"data.train: {source.path} is a copy of {first}: the same documents would come again with the same "
                "masks; name one of them, with `epochs: 2` (data.blend concatenate) or a larger `weight`"
            )


def refuse_overlap(train: RowSource, held_out: Mapping[str, RowSource], data: DataSection) -> None:
    """Refuse held-out documents that are trained on, also under another path; without a split only warn of them."""
    wanted = {source.name for source in data.validation if source.part == "train"}
    for name, rows in held_out.items():
        shared = [
            source.path
            for source, trained in zip(data.train, train.indexes, strict=True)
            if name not in wanted and any(_shares_documents(index, trained) for index in rows.indexes)
        ]
        message = f"held-out source {name} has documents of the training source {', '.join(shared)}"
        if shared and data.split is not None:
            raise DataError(f"{message}; set its part to valid or test, or name another dataset")
        if shared:
            logger.warning("warning: %s; data.split keeps them apart", message)


def _shares_documents(one: SampleIndex, other: SampleIndex) -> bool:
    here, there = one.meta["dataset"], other.meta["dataset"]
    if here["fingerprint"] == (other.dataset.metadata or {}).get(SHUFFLED_FROM):
        return True
    first = max(here["documents"][0], there["documents"][0])
    last = min(here["documents"][1], there["documents"][1])
    return bool(here["fingerprint"] == there["fingerprint"] and first < last)


def _part(
    source: TrainSource | ValidationSource, part: str, data: DataSection, copies: bool, may_be_empty: bool = False
) -> SourcePart:
    path = prefix = source.path
    if part == "all" or data.split is None:
        return SourcePart(path, language=source.language)
    dataset = IndexedDataset(path)
    documents = split_documents(dataset.num_documents, split_shares(data.split))[PARTS.index(part)]
    if data.split_seed is not None:
        order, documents = draw_part(dataset, data.split, data.split_seed, part)
        prefix = _shuffled(dataset, order, data) if copies else path
    chosen = SourcePart(prefix, documents, source.language)
    if chosen.is_empty and not may_be_empty:
        raise DataError(
            f"{path}: data.split {data.split} gives its {part} part none of its {dataset.num_documents} documents; "
            "change the split, or leave the source out"
        )
    return chosen

"""All rows of a run: which documents of which dataset it trains on, which are held out, and their sample indexes.

With `data.split` the documents of a dataset are cut, in their order, into train, valid and test as Megatron cuts them
(blended_megatron_dataset_builder.py): bound i is int(round(sum of the first i shares · documents)).
"""

from __future__ import annotations

import filecmp
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from ctxlm_ds.data.dataset.index_file import read_index
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file
from ctxlm_ds.data.index.build import Verify, build_rows
from ctxlm_ds.data.index.index import RowSource, SampleIndex
from ctxlm_ds.data.index.record import SourcePart
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.sections import DataSection, RowSettings, TrainSource, ValidationSource
from ctxlm_ds.recipe.source_rules import PARTS, source_names, split_shares

if TYPE_CHECKING:
    from ctxlm_ds.objectives.base import Objective
    from ctxlm_ds.tokenizers.base import Tokenizer

logger = logging.getLogger("ctxlm_ds")


@dataclass(frozen=True)
class RunRows:
    """The sample indexes of a run."""

    train: RowSource
    """One index for each of data.train, in its order."""
    validation: Mapping[str, RowSource]

    def describe(self, sources: Sequence[TrainSource], tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the facts that must be the same for a resume to continue the same stream."""
        found = [
            {
                "path": source.path,
                "documents": index.meta["dataset"]["documents"],
                "rows": len(index),
                "index": index.meta["key"],
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
    if not data.train:
        raise ConfigError(
            "data.train is empty: name one or more dataset prefixes made by ctxlm preprocess, e.g. "
            "--set data.train=[data/wiki_text_sentence]"
        )
    build = partial(
        build_rows, tokenizer=tokenizer, settings=settings, objective=objective, workers=workers, verify=verify
    )
    train = build(train_parts(data))
    refuse_copies(train, data)
    objective.read_corpus(train, settings.seed)
    held_out = {name: build([part], held_out=True) for name, part in held_out_parts(data).items()}
    refuse_overlap(train, held_out, data)
    return RunRows(train, held_out)


def split_documents(num_documents: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Return for each share the first document of its part, and the one after its last."""
    return list(pairwise(round(total * float(num_documents)) for total in accumulate(shares, initial=0.0)))


def train_parts(data: DataSection) -> list[SourcePart]:
    """Return the documents of each of data.train, or raise a DataError if a split leaves one none."""
    return [_part(source, "train", data) for source in data.train]


def held_out_parts(data: DataSection) -> dict[str, SourcePart]:
    """Return the held-out documents by name: data.validation, or each training source's valid part of a split."""
    if data.validation or data.split is None:
        return {source.name: _part(source, source.part, data) for source in data.validation}
    parts = {}
    for name, source in zip(source_names(data), data.train, strict=True):
        parts[name] = _part(source, "valid", data, may_be_empty=True)
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
    first = max(here["documents"][0], there["documents"][0])
    last = min(here["documents"][1], there["documents"][1])
    return bool(here["fingerprint"] == there["fingerprint"] and first < last)


def _part(
    source: TrainSource | ValidationSource, part: str, data: DataSection, may_be_empty: bool = False
) -> SourcePart:
    path = source.path
    if part == "all" or data.split is None:
        return SourcePart(path, language=source.language)
    idx_path = dataset_file(path, "idx")
    # The .idx alone; the dataset is checked when its samples are opened.
    num_documents = (read_index(idx_path) if idx_path.is_file() else IndexedDataset(path)).num_documents
    documents = split_documents(num_documents, split_shares(data.split))[PARTS.index(part)]
    chosen = SourcePart(path, documents, source.language)
    if chosen.is_empty and not may_be_empty:
        raise DataError(
            f"{path}: data.split {data.split} gives its {part} part none of its {num_documents} documents; "
            "change the split, or leave the source out"
        )
    return chosen

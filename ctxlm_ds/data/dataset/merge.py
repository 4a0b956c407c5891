"""Join datasets into one without decoding them.

The result is what one preprocessing of all the text would have written; its JSON lists the parts as well. The files are
copied in blocks while all checksums are checked, and memory does not grow with the tokens. They are written in
PREFIX.partial-merge/, which is locked: the next join of that name removes what a killed one left. merge_inputs.py finds
the parts and checks that they belong together.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ctxlm_ds.atomic import PARTIAL_MARK, is_full_disk, stop_signals_interrupt
from ctxlm_ds.console import byte_progress, format_size
from ctxlm_ds.data.dataset.inspection import check_spans_digest
from ctxlm_ds.data.dataset.merge_inputs import MergeInput, find_parts, open_parts
from ctxlm_ds.data.dataset.metadata import METADATA_VERSION, check_digest
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file
from ctxlm_ds.data.dataset.writer import IndexedDatasetWriter, LockedFolder, publish_parts, refuse_existing
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

_MAX_ERROR_LINES = 1000
_SUMMED = ("empty_documents", "bad_records", "input_bytes", "characters", "unknown_tokens")
_OF_A_PART = (
    "documents", "sequences", "tokens", "empty_documents", "bad_records", "source_signature", "shard", "sha256"
)  # fmt: skip
_REPLACED = ("format", "version", "documents", "sequences", "tokens", "dtype", "sha256", "build_key", "parts")
_NOT_THESE = ", and not as these parts joined"


@dataclass(frozen=True, slots=True)
class MergeResult:
    """A joined dataset."""

    dataset: IndexedDataset
    num_parts: int
    seconds: float
    complete_already: bool
    """True if it existed, joined from the same parts, and was left as it is."""


def merge_datasets(inputs: Sequence[str], output_prefix: str | Path, overwrite: bool = False) -> MergeResult:
    """Join datasets (prefixes, or folders of them) in the order given.

    Raises DataError if the parts do not belong together, one is missing or damaged, the output exists and was made of
    something else, another process writes it, or the disk is full; what was written is removed first.
    """
    start_s = time.monotonic()
    output = str(output_prefix)
    parts = open_parts(find_parts(inputs, output))
    complete = not overwrite and _is_complete(output, parts)
    folder = LockedFolder(f"{output}{PARTIAL_MARK}merge")
    if not complete:
        refuse_existing(output, overwrite, _NOT_THESE)
        _write(output, parts, folder, overwrite)
    elif folder.path.exists():
        with suppress(DataError), folder:  # killed after the last file got its name; leaving removes the folder
            pass
    return MergeResult(IndexedDataset(output), len(parts), time.monotonic() - start_s, complete)


def _is_complete(output: str, parts: Sequence[MergeInput]) -> bool:
    """Return whether the output exists and was joined from these parts (its tokens are not read again)."""
    try:
        present = IndexedDataset(output)
        _ = present.index_digest  # compared with the recorded one
    except DataError:
        return False
    if parts[0].metadata:
        return present.metadata is not None and present.metadata.get("build_key") == _build_key(parts)
    # Megatron's parts have no JSON to compare; the index has the length of every sequence of every part.
    document = sequence = 0
    for part in parts:
        arrays = part.open().arrays
        last = document + arrays.num_documents
        lengths = present.arrays.lengths[sequence : sequence + arrays.num_sequences]
        documents = present.arrays.documents[document : last + 1]
        if not (np.array_equal(lengths, arrays.lengths) and np.array_equal(documents - sequence, arrays.documents)):
            return False
        document, sequence = last, sequence + arrays.num_sequences
    return present.metadata is None and (document, sequence) == (present.num_documents, present.num_sequences)


def _write(output: str, parts: Sequence[MergeInput], folder: LockedFolder, overwrite: bool) -> None:
    parent = Path(output).parent
    try:
        with folder, stop_signals_interrupt():
            if folder.clear():
                logger.info("%s: removed what an interrupted join left", folder.path)
            needed = sum(part.num_bytes for part in parts)
            if (free := shutil.disk_usage(parent).free) < needed:
                raise DataError(
                    f"{parent}: {format_size(free)} are free, the joined dataset takes {format_size(needed)};"
                    " free some space or choose another --output-prefix"
                )
            with (
                byte_progress("merge", needed) as progress,
                IndexedDatasetWriter(
                    output, parts[0].dtype, overwrite, folder.path, with_spans=parts[0].has_spans
                ) as writer,
            ):
                for part in parts:
                    dataset = part.open()
                    digest = writer.add_dataset(dataset, progress.update)
                    if part.has_spans:
                        check_spans_digest(dataset)
                    for source, recorded in part.bin_digests:
                        check_digest(dataset_file(part.prefix, "bin"), digest, recorded, source)
                errors = "".join(islice(_error_lines(parts), _MAX_ERROR_LINES))
                writer.prepare(_merged_metadata(parts), errors)
                progress.update(needed)
            folder.check()
            refuse_existing(output, overwrite, _NOT_THESE)  # another program may have written it meanwhile
            publish_parts(output, folder.path)
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise DataError(
            f"{parent}: {error.strerror}; nothing was kept, free some space or choose another --output-prefix"
        ) from error


def _error_lines(parts: Sequence[MergeInput]) -> Iterator[str]:
    """Yield the records that were skipped when the parts were made, as far as they were kept."""
    for part in parts:
        path = dataset_file(part.prefix, "errors.jsonl")
        if path.is_file():
            with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
                yield from file


def _build_key(parts: Sequence[MergeInput]) -> str:
    """Return a sha256 (hex) of what decides a joined dataset: the checksums of its parts, in order."""
    decided = [[part.idx_digest, *(digest for _, digest in part.bin_digests[:1]), *part.spans_digest] for part in parts]
    return hashlib.sha256(json.dumps(["joined", METADATA_VERSION, decided]).encode()).hexdigest()


def _merged_metadata(parts: Sequence[MergeInput]) -> dict[str, Any] | None:
    """Return settings that all parts share, sums of their counts, and the parts; None for datasets of Megatron."""
    if not parts[0].metadata:
        return None
    shared: dict[str, Any] = {}
    for key in parts[0].metadata:
        values = [part.metadata.get(key) for part in parts]
        if key in _REPLACED:
            continue
        if key == "unknown_tokens" and None in values:
            continue  # a part from before they were counted
        if key in _SUMMED:
            shared[key] = sum(value or 0 for value in values)
        elif key in ("inputs", "sources"):
            entries = {json.dumps(entry, sort_keys=True): entry for value in values for entry in value or []}
            shared[key] = list(entries.values())
        elif all(map(_is_counts, values)):
            total: Counter[str] = Counter()
            for value in values:
                total.update(value)
            shared[key] = dict(total)
        elif all(value == values[0] for value in values):
            shared[key] = values[0]
    records = [record for part in parts for record in _records(part)]
    return {**shared, "build_key": _build_key(parts), "parts": records}


def _is_counts(value: object) -> bool:
    """Return True for an object of numbers, such as bad records by reason."""
    return isinstance(value, dict) and all(type(count) is int for count in value.values())


def _records(part: MergeInput) -> Iterator[dict[str, Any]]:
    """Yield the record of a part in the joined JSON; the records of its parts if it was joined itself."""
    if part.metadata.get("parts"):
        yield from part.metadata["parts"]
        return
    kept = {key: part.metadata[key] for key in _OF_A_PART if key in part.metadata}
    reasons = {key: value for key, value in part.metadata.items() if _is_counts(value)}
    yield {"name": Path(part.prefix).name, **kept, **reasons}

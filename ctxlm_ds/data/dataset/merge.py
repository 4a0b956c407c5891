"""Join datasets into one without decoding them.

The result is what one preprocessing of all the text would have written; its JSON lists the parts as well. The files are
copied in blocks while all checksums are checked, and memory does not grow with the tokens. They are written in
PREFIX.partial-merge/, which is locked: the next join of that name removes what a killed one left. merge_inputs.py finds
the parts and checks that they belong together.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from ctxlm_ds.atomic import PARTIAL_MARK, is_full_disk
from ctxlm_ds.console import byte_progress, format_size
from ctxlm_ds.data.dataset.checksums import check_digest
from ctxlm_ds.data.dataset.merge_inputs import MergeInput, build_key, find_parts, merged_metadata, open_parts
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file
from ctxlm_ds.data.dataset.writer import IndexedDatasetWriter, publish_parts, refuse_existing
from ctxlm_ds.data.preprocess.folder import PartialFolder
from ctxlm_ds.data.preprocess.pool import stop_signals_interrupt
from ctxlm_ds.errors import DataError

logger = logging.getLogger("ctxlm_ds")

FOLDER_SUFFIX = f"{PARTIAL_MARK}merge"
_MAX_ERROR_LINES = 1000
_NOT_THESE = ", and not as these parts joined"


@dataclass(frozen=True, slots=True)
class MergeResult:
    """A joined dataset."""

    prefix: str
    num_parts: int
    num_documents: int
    num_sequences: int
    num_tokens: int
    num_bytes: int
    """Size of .bin and .idx together."""
    seconds: float
    complete_already: bool
    """True if it existed, joined from the same parts, and was left as it is."""


def merge_datasets(inputs: Sequence[str], output_prefix: str | Path, overwrite: bool = False) -> MergeResult:
    """Join datasets (prefixes, or folders of them) in the order given.

    Raises:
        DataError: parts do not belong together, one is missing or damaged, the output exists and was made of something
            else, another process writes it, or the disk is full; what was written is removed first.
    """
    start_s = time.monotonic()
    output = str(output_prefix)
    parts = open_parts(find_parts(inputs, output))
    complete = not overwrite and _is_complete(output, parts)
    folder = PartialFolder(output, suffix=FOLDER_SUFFIX)
    if not complete:
        refuse_existing(output, overwrite, _NOT_THESE)
        _write(output, parts, folder, overwrite)
    elif folder.path.exists():
        with suppress(DataError), folder:  # killed after the last file got its name; leaving removes the folder
            pass
    return MergeResult(
        prefix=output,
        num_parts=len(parts),
        num_documents=sum(part.num_documents for part in parts),
        num_sequences=sum(part.num_sequences for part in parts),
        num_tokens=sum(part.proof.num_tokens for part in parts),
        num_bytes=sum(dataset_file(output, extension).stat().st_size for extension in ("bin", "idx")),
        seconds=time.monotonic() - start_s,
        complete_already=complete,
    )


def _is_complete(output: str, parts: Sequence[MergeInput]) -> bool:
    """Return whether the output exists and was joined from these parts (its tokens are not read again)."""
    try:
        present = IndexedDataset(output)
        _ = present.index_digest  # compared with the recorded one
    except DataError:
        return False
    if parts[0].metadata:
        return present.metadata is not None and present.metadata.get("build_key") == build_key(parts)
    # Megatron's parts have no JSON to compare; the index has the length of every sequence of every part.
    document = sequence = 0
    for part in parts:
        arrays, last = part.open().arrays, document + part.num_documents
        lengths = present.arrays.lengths[sequence : sequence + part.num_sequences]
        documents = present.arrays.documents[document : last + 1]
        if not (np.array_equal(lengths, arrays.lengths) and np.array_equal(documents - sequence, arrays.documents)):
            return False
        document, sequence = last, sequence + part.num_sequences
    return present.metadata is None and (document, sequence) == (present.num_documents, present.num_sequences)


def _write(output: str, parts: Sequence[MergeInput], folder: PartialFolder, overwrite: bool) -> None:
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
                IndexedDatasetWriter(output, parts[0].dtype, overwrite, folder.path) as writer,
            ):
                for part in parts:
                    digest = writer.add_dataset(part.open(), progress.update)
                    for source, recorded in part.bin_digests:
                        check_digest(dataset_file(part.prefix, "bin"), digest, recorded, source)
                errors = "".join(islice(_error_lines(parts), _MAX_ERROR_LINES))
                writer.prepare(merged_metadata(parts), errors)
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

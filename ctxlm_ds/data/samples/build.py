"""Building the sample index of a dataset (index.py says what it holds).

In: an indexed dataset, a tokenizer, a recipe, the objective where static masking stores its work. Out: the folder,
which appears whole; several processes may build the same one at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.config.schema import PAIR_FORMATS, RunConfig
from ctxlm_ds.data.collate import Objective, prediction_budgets
from ctxlm_ds.data.indexed import IndexedDataset
from ctxlm_ds.data.samples.blocks import block_rows, piece_record, text_bounds
from ctxlm_ds.data.samples.doc_sentences import doc_sentences
from ctxlm_ds.data.samples.full_sentences import full_sentences
from ctxlm_ds.data.samples.index import RowSource, SampleIndex, index_place, open_dataset
from ctxlm_ds.data.samples.packing import pack_samples
from ctxlm_ds.data.samples.reader import SampleReader
from ctxlm_ds.data.samples.record import INDEX_VERSION, SAMPLE_DTYPE, Record, SampleSettings, in_chunks, sample_settings
from ctxlm_ds.data.samples.segment_pair import segment_pairs
from ctxlm_ds.data.samples.sentence_pair import sentence_pairs
from ctxlm_ds.data.samples.sentence_table import SentenceTable, require_pairs_possible, sentence_table
from ctxlm_ds.data.samples.static import write_masked_copies
from ctxlm_ds.data.samples.storage import META_NAME, NpyAppender, new_folder, open_array, write_meta
from ctxlm_ds.data.samples.template import SINGLE_SPECIALS, SequenceTemplate
from ctxlm_ds.errors import ConfigError

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

logger = logging.getLogger("ctxlm_ds")

INDEX_FORMAT = "ctxlm_ds-samples"
SMALLEST_ROOM = 2


def build_rows(
    prefixes: Sequence[str | Path],
    tokenizer: Tokenizer,
    config: RunConfig,
    objective: Objective | None = None,
    held_out: bool = False,
) -> RowSource:
    """Build the missing indexes of datasets and open them all as one row space (see build_sample_index)."""
    return RowSource([build_sample_index(prefix, tokenizer, config, objective, held_out) for prefix in prefixes])


def build_sample_index(
    prefix: str | Path,
    tokenizer: Tokenizer,
    config: RunConfig,
    objective: Objective | None = None,
    held_out: bool = False,
) -> SampleIndex:
    """Open a dataset's sample index, building it first if it does not exist.

    Args:
        prefix: the dataset, without .bin/.idx.
        objective: needed for static masking only.
        held_out: a validation set: fixed seed, one pass, masks never stored.

    Raises:
        DataError: the dataset does not fit the tokenizer or the sample format.
        ConfigError: seq_length is too short for the sample format, or static masking without an objective.
    """
    dataset = open_dataset(prefix, tokenizer)
    settings = sample_settings(config, held_out)
    directory, key = index_place(dataset, tokenizer, settings, config.data.sample_index_dir)
    if not (directory / META_NAME).exists():
        logger.info("building the sample index %s", directory)
        with new_folder(directory) as partial:
            counts = _write_samples(partial, dataset, tokenizer, settings)
            if settings.static_masking is not None:
                _write_copies(partial, dataset, tokenizer, config, objective)
            write_meta(partial, _meta(dataset, settings, key) | counts)
    return SampleIndex(directory, dataset, SequenceTemplate.of(tokenizer))


def _meta(dataset: IndexedDataset, settings: SampleSettings, key: str) -> dict[str, Any]:
    return {
        "format": INDEX_FORMAT,
        "version": INDEX_VERSION,
        "key": key,
        "settings": asdict(settings),
        "dataset": {"prefix": str(dataset.prefix), "fingerprint": dataset.fingerprint},
    }


def _write_samples(
    directory: Path, dataset: IndexedDataset, tokenizer: Tokenizer, settings: SampleSettings
) -> dict[str, int]:
    """Write samples.npy and, packed, the rows; what was made, in numbers."""
    if settings.sample_format == "blocks":
        return _write_blocks(directory, dataset, tokenizer.sep_id, settings)
    template = SequenceTemplate.of(tokenizer)
    table = sentence_table(dataset, template.sep_id)
    with NpyAppender(directory / "samples.npy", SAMPLE_DTYPE) as file:
        for duplicate in range(settings.num_duplicates):
            for chunk in in_chunks(sample_records(table, dataset.prefix, settings, template, duplicate)):
                file.append(chunk)
    lengths = open_array(directory, "samples")["num_tokens"]
    return {
        "documents": table.num_documents,
        "sentences": table.num_sentences,
        "samples": len(lengths),
        "rows": _write_rows(directory, lengths, settings) if settings.packing else len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
    }


def _write_blocks(directory: Path, dataset: IndexedDataset, eod_id: int, settings: SampleSettings) -> dict[str, int]:
    """The same for blocks, whose rows are made together with their samples."""
    bounds, num_documents = text_bounds(dataset, eod_id, reset_at_documents=settings.packing)
    counts: list[int] = []

    def records() -> Iterator[Record]:
        for row in block_rows(bounds, settings.seq_length, settings.max_sequences_per_row):
            counts.append(len(row))
            yield from map(piece_record, row)

    with NpyAppender(directory / "samples.npy", SAMPLE_DTYPE) as file:
        for chunk in in_chunks(records()):
            file.append(chunk)
    if settings.packing:
        with (
            NpyAppender(directory / "row_starts.npy", np.int64) as starts,
            NpyAppender(directory / "row_samples.npy", np.int64) as samples,
        ):
            starts.append(np.concatenate([[0], np.cumsum(counts)]))
            samples.append(np.arange(file.count))
    lengths = open_array(directory, "samples")["num_tokens"]
    return {
        "documents": num_documents,
        "sentences": dataset.num_sequences,
        "samples": len(lengths),
        "rows": len(counts),
        "tokens": int(lengths.sum(dtype=np.int64)),
    }


def sample_records(
    table: SentenceTable, prefix: object, settings: SampleSettings, template: SequenceTemplate, duplicate: int
) -> Iterator[Record]:
    """The samples of one pass over a dataset in the format that the settings name."""
    sample_format = settings.sample_format
    specials = template.pair_specials if sample_format in PAIR_FORMATS else SINGLE_SPECIALS
    room = settings.seq_length - specials
    if room < SMALLEST_ROOM:
        raise ConfigError(
            f"data.seq_length {settings.seq_length} leaves {room} tokens beside {specials} special ones; "
            f"{sample_format} needs at least {specials + SMALLEST_ROOM}"
        )
    if sample_format in PAIR_FORMATS:
        require_pairs_possible(table, prefix, sample_format)
    if sample_format == "segment_pair":
        return segment_pairs(table, room, specials, settings.short_seq_prob, settings.seed, duplicate)
    if sample_format == "sentence_pair":
        return sentence_pairs(table, room, specials, settings.seed, duplicate)
    if sample_format == "full_sentences":
        return full_sentences(table, room)
    return doc_sentences(table, room)


def _write_rows(directory: Path, lengths: NDArray[np.int32], settings: SampleSettings) -> int:
    """Write row_starts.npy and row_samples.npy; the number of rows."""
    with (
        NpyAppender(directory / "row_starts.npy", np.int64) as starts,
        NpyAppender(directory / "row_samples.npy", np.int64) as samples,
    ):
        starts.append(np.zeros(1, dtype=np.int64))
        rows = pack_samples(lengths, settings.seq_length, settings.max_sequences_per_row, settings.seed)
        for numbers, counts in rows:
            starts.append(samples.count + np.cumsum(counts))
            samples.append(numbers)
        return starts.count - 1


def _write_copies(
    directory: Path, dataset: IndexedDataset, tokenizer: Tokenizer, config: RunConfig, objective: Objective | None
) -> None:
    """Write the masked copies of static masking."""
    if objective is None:
        raise ConfigError("objective.masking is static: building the sample index needs the objective, none was given")
    records = open_array(directory, "samples")
    reader = SampleReader(records, dataset, SequenceTemplate.of(tokenizer), config.data.sample_format)
    write_masked_copies(
        directory,
        reader,
        objective,
        lambda lengths: prediction_budgets(lengths, config.data, config.objective),
        tokenizer.vocab_size,
        config.training.seed,
    )

"""A table of built sample indexes: counts, padding, shares of the sequences' labels, lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.console import aligned
from ctxlm_ds.data.index.index import SampleIndex
from ctxlm_ds.data.index.record import RECORDS_AT_ONCE

QUANTILES = (0.05, 0.5, 0.95)
HEAD = ("sample index", "sentences", "samples", "a row", "padding", "lengths")
LABEL_COLUMN = -1
"""The share of label 0 comes before the lengths, if sequences have labels."""


def summary_lines(indexes: Mapping[str, SampleIndex]) -> Iterator[str]:
    """Yield a table of the indexes by name, then the folder and settings of each."""
    labels = {index.format.sequence_labels[:1] for index in indexes.values()}
    head = (*HEAD[:LABEL_COLUMN], *max(labels, default=()), *HEAD[LABEL_COLUMN:])
    yield from aligned([head, *(_row(name, index) for name, index in indexes.items())])
    yield f"  lengths: tokens of a sample at {', '.join(f'{share:.0%}' for share in QUANTILES)}"
    for name, index in indexes.items():
        yield f"  {name}: {_kind(index)}, in {index.directory}"


def _row(name: str, index: SampleIndex) -> tuple[str, ...]:
    meta, passes = index.meta, index.meta["settings"]["num_duplicates"]
    positions = max(1, len(index)) * meta["settings"]["seq_length"]
    return (
        name,
        f"{meta['sentences']:,}",
        f"{meta['samples']:,} ({passes} pass{'' if passes == 1 else 'es'})",
        f"{meta['samples'] / max(1, meta['rows']):.2f}",
        f"{1 - meta['tokens'] / positions:.1%}",
        *_label_share(index),
        " ".join(map(str, _quantiles(index))),
    )


def _label_share(index: SampleIndex) -> tuple[str, ...]:
    """Return the share of sequences of label 0; nothing if the format has no labels."""
    if not index.format.sequence_labels:
        return ()
    labels: NDArray[np.int8] = index.records["is_random"]
    return (f"{(labels == 0).mean():.1%}" if len(labels) else "-",)


def _kind(index: SampleIndex) -> str:
    settings = index.meta["settings"]
    return (
        f"{settings['sample_format']}, {settings['seq_length']} positions"
        + (f", up to {settings['max_sequences_per_row']} sequences a row" if settings["packing"] else "")
        + (", masked copies" if index.is_static else "")
    )


def _quantiles(index: SampleIndex) -> NDArray[np.int64]:
    """Return the lengths of samples at QUANTILES, counted in pieces: an index may be larger than memory."""
    counts = np.zeros(index.meta["settings"]["seq_length"] + 1, dtype=np.int64)
    for begin in range(0, len(index.records), RECORDS_AT_ONCE):
        counts += np.bincount(index.records["num_tokens"][begin : begin + RECORDS_AT_ONCE], minlength=len(counts))
    places = np.maximum(1, np.ceil(np.multiply(QUANTILES, counts.sum())))
    return np.minimum(np.searchsorted(np.cumsum(counts), places), len(counts) - 1)

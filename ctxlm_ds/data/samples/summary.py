"""The figures of built sample indexes, for people: counts, padding, next-sentence share, lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.samples.index import SampleIndex, next_sentence_share
from ctxlm_ds.data.samples.record import RECORDS_AT_ONCE

if TYPE_CHECKING:
    from rich.table import Table

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def summary_lines(index: SampleIndex) -> dict[str, str]:
    """An index's figures by name."""
    meta, settings = index.meta, index.meta["settings"]
    positions = max(1, len(index)) * settings["seq_length"]
    share = next_sentence_share(index)
    lengths = _quantiles(index)
    return {
        "folder": str(index.directory),
        "format": f"{settings['sample_format']}, {settings['seq_length']} positions"
        + (f", up to {settings['max_sequences_per_row']} sequences a row" if settings["packing"] else "")
        + (", masked copies" if index.is_static else ""),
        "documents": f"{meta['documents']:,}",
        "sentences": f"{meta['sentences']:,}",
        "samples": f"{meta['samples']:,} ({settings['num_duplicates']} pass(es))",
        "rows": f"{meta['rows']:,} ({meta['samples'] / max(1, meta['rows']):.2f} samples a row)",
        "tokens": f"{meta['tokens']:,}",
        "padding": f"{1 - meta['tokens'] / positions:.1%}",
        "B follows A": "-" if share is None else f"{share:.1%}",
        "lengths": ", ".join(f"{q:.0%} {length:.0f}" for q, length in zip(QUANTILES, lengths, strict=True)),
    }


def _quantiles(index: SampleIndex) -> NDArray[np.int64]:
    """Lengths of samples at QUANTILES, counted in pieces: an index may be larger than memory."""
    counts = np.zeros(index.meta["settings"]["seq_length"] + 1, dtype=np.int64)
    for begin in range(0, len(index.records), RECORDS_AT_ONCE):
        counts += np.bincount(index.records["num_tokens"][begin : begin + RECORDS_AT_ONCE], minlength=len(counts))
    places = np.maximum(1, np.ceil(np.multiply(QUANTILES, counts.sum())))
    return np.minimum(np.searchsorted(np.cumsum(counts), places), len(counts) - 1)


def summary_table(indexes: dict[str, SampleIndex]) -> Table:
    """A column for each index (name to index), a line for each figure."""
    from rich.markup import escape
    from rich.table import Column, Table

    columns = {name: summary_lines(index) for name, index in indexes.items()}
    folded = [Column(name, overflow="fold") for name in columns]
    table = Table("", *folded, title="sample indexes", title_justify="left")
    for figure in next(iter(columns.values())):
        table.add_row(figure, *(escape(lines[figure]) for lines in columns.values()))
    return table

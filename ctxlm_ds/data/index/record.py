"""What one line of a sample index holds, and the settings that decide its contents.

A sample is one or two ranges of the dataset's flat token stream, already truncated; special tokens are added on
reading.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ctxlm_ds.recipe.schema import RunConfig

INDEX_VERSION = 3
HELD_OUT_SEED = 0
RECORDS_AT_ONCE = 1 << 16
SAMPLE_DTYPE = np.dtype(
    [
        ("a_start", "<i8"),
        ("a_end", "<i8"),
        ("b_start", "<i8"),
        ("b_end", "<i8"),
        ("num_tokens", "<i4"),
        ("is_random", "i1"),
    ]
)
"""Token ranges of A and B (B empty where the format has one text), length with special tokens, next-sentence label."""


@dataclass(frozen=True)
class SourcePart:
    """A dataset, or some of its documents."""

    prefix: str
    """Path without .bin/.idx."""
    documents: tuple[int, int] | None = None
    """First document, and the one after the last; None is all."""


Source = SourcePart | str | Path


def as_part(source: Source) -> SourcePart:
    """A source that may be named by its prefix alone."""
    return source if isinstance(source, SourcePart) else SourcePart(str(source))


@dataclass(frozen=True)
class SampleSettings:
    """Every setting that changes a sample index; two indexes of equal settings and dataset are equal."""

    sample_format: str
    seq_length: int
    short_seq_prob: float
    num_duplicates: int
    seed: int
    packing: bool
    """Rows hold several sequences: packed ones, or the documents of a block."""
    max_sequences_per_row: int
    static_masking: dict[str, Any] | None
    """The objective's settings where masked copies are stored, else None."""

    def key(self, dataset_fingerprint: str, documents: tuple[int, int], tokenizer_fingerprint: str) -> str:
        """64 hexadecimal digits that name the index of these documents of a dataset."""
        content = asdict(self) | {
            "version": INDEX_VERSION,
            "dataset": dataset_fingerprint,
            "documents": list(documents),
            "tokenizer": tokenizer_fingerprint,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sample_settings(config: RunConfig, held_out: bool = False) -> SampleSettings:
    """A recipe's settings, normalised: what a format ignores does not change the key.

    Held-out data gets one pass under a fixed seed and never stored masks, so that figures compare between runs.
    """
    data = config.data
    static = getattr(config.objective, "masking", None) == "static" and not held_out
    return SampleSettings(
        sample_format=data.sample_format,
        seq_length=data.seq_length,
        short_seq_prob=getattr(data, "short_seq_prob", 0.0),
        num_duplicates=1 if held_out else data.passes,
        seed=HELD_OUT_SEED if held_out else config.training.seed,
        packing=data.shares_rows,
        max_sequences_per_row=data.sequences_per_row,
        static_masking=config.objective.model_dump(mode="json") if static else None,
    )

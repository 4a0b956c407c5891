"""What one line of a sample index holds, and the settings that decide its contents.

A sample is one or two ranges of the dataset's flat token stream, already truncated; special tokens are added on
reading.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.config.schema import RunConfig
from ctxlm_ds.data.sample import NO_LABEL

INDEX_VERSION = 1
HELD_OUT_SEED = 0
CHUNK_SAMPLES = 1 << 16
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

Record = tuple[int, int, int, int, int, int]


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

    def key(self, dataset_fingerprint: str, tokenizer_fingerprint: str) -> str:
        """64 hexadecimal digits that name the index of this dataset."""
        content = asdict(self) | {
            "version": INDEX_VERSION,
            "dataset": dataset_fingerprint,
            "tokenizer": tokenizer_fingerprint,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sample_settings(config: RunConfig, held_out: bool = False) -> SampleSettings:
    """A recipe's settings, normalised: what a format ignores does not change the key.

    Held-out data gets one pass under a fixed seed and never stored masks, so that figures compare between runs.
    """
    data = config.data
    static = config.objective.masking == "static" and config.objective.name != "causal_lm" and not held_out
    return SampleSettings(
        sample_format=data.sample_format,
        seq_length=data.seq_length,
        short_seq_prob=data.short_seq_prob if data.sample_format == "segment_pair" else 0.0,
        num_duplicates=1 if held_out else data.num_duplicates,
        seed=HELD_OUT_SEED if held_out else config.training.seed,
        packing=data.shares_rows,
        max_sequences_per_row=data.sequences_per_row,
        static_masking=config.objective.model_dump(mode="json") if static else None,
    )


def in_chunks(records: Iterator[Record]) -> Iterator[NDArray[np.void]]:
    """Records as structured arrays of at most CHUNK_SAMPLES, so that an index larger than memory can be written."""
    chunk: list[Record] = []
    for record in records:
        chunk.append(record)
        if len(chunk) == CHUNK_SAMPLES:
            yield np.array(chunk, dtype=SAMPLE_DTYPE)
            chunk = []
    if chunk:
        yield np.array(chunk, dtype=SAMPLE_DTYPE)


def single_record(start: int, end: int, num_tokens: int) -> Record:
    """The record of one text."""
    return start, end, 0, 0, num_tokens, NO_LABEL

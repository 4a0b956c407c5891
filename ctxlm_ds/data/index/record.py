"""The record of a sample, and the settings that decide the contents of a sample index.

A sample is one or two ranges of the dataset's flat token stream, already truncated; special tokens are added when it is
read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.recipe.sections import RowSettings
from ctxlm_ds.registry import FORMATS, OBJECTIVES

INDEX_VERSION = 3
HELD_OUT_SEED = 0
LATER_SETTINGS = ("word_starts", "z_loss")
"""Settings of objectives that name an index only at another value than the default: they came after indexes."""
RECORDS_AT_ONCE = 1 << 16
SAMPLE_DTYPE = np.dtype(
    [*((name, "<i8") for name in ("a_start", "a_end", "b_start", "b_end")), ("num_tokens", "<i4"), ("is_random", "i1")]
)
"""Token ranges of A and B (B is empty if the format has one text), length with special tokens, and the label of the
sequence (NO_LABEL if the format has none)."""


def even_records(first: int, after: int, size: int, second: tuple[int, int] = (0, 0)) -> Iterator[NDArray[Any]]:
    """Yield records of the ranges of `size`, the last one shorter, from `first` to `after` as A; B is `second`."""
    for begin in range(first, after, size * RECORDS_AT_ONCE):
        starts = np.arange(begin, min(after, begin + size * RECORDS_AT_ONCE), size)
        records = np.zeros(len(starts), dtype=SAMPLE_DTYPE)
        records["a_start"], records["a_end"] = starts, np.minimum(starts + size, after)
        records["b_start"], records["b_end"] = second
        records["num_tokens"], records["is_random"] = records["a_end"] - starts, NO_LABEL
        yield records


@dataclass(frozen=True)
class SourcePart:
    """A dataset, or some of its documents."""

    prefix: str
    """Path without .bin/.idx."""
    documents: tuple[int, int] | None = None
    """First document, and the one after the last; None means all."""
    language: str | None = None
    """Token of the language of its rows."""

    @property
    def is_empty(self) -> bool:
        return self.documents is not None and self.documents[0] == self.documents[1]


Source = SourcePart | str | Path


@dataclass(frozen=True)
class SampleSettings:
    """Every setting that changes a sample index; equal settings and an equal dataset give equal indexes."""

    sample_format: str
    seq_length: int
    num_duplicates: int
    seed: int
    packing: bool
    """True if rows hold several sequences: packed ones, or the documents of a block."""
    max_sequences_per_row: int
    static_masking: dict[str, Any] | None
    """The objective's settings with static masks, else None."""
    own: dict[str, Any] = field(default_factory=dict)
    """Settings that only the sample format has."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in the form of meta.json and of the key."""
        shared = {name: value for name, value in asdict(self).items() if name != "own"}
        # Part of the key of every index since version 3.
        return {"short_seq_prob": 0.0} | shared | self.own

    def key(self, dataset_fingerprint: str, documents: tuple[int, int], tokenizer_fingerprint: str) -> str:
        """Return 64 hexadecimal digits that name the index of these documents of a dataset."""
        content = self.to_dict() | {
            "version": INDEX_VERSION,
            "dataset": dataset_fingerprint,
            "documents": list(documents),
            "tokenizer": tokenizer_fingerprint,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sample_settings(settings: RowSettings, held_out: bool = False) -> SampleSettings:
    """Return a recipe's settings, normalised: a setting that the format ignores does not change the key.

    Held-out data gets one pass under a fixed seed and never static masks, so that figures compare between runs.
    """
    data, objective = settings.data, settings.objective
    sample_format = FORMATS.get(data.sample_format)()
    static_masking: dict[str, Any] | None = None
    if not held_out and OBJECTIVES.get(objective.name).is_static(objective):
        later = {name for name, field in type(objective).model_fields.items()
                 if name in LATER_SETTINGS and getattr(objective, name) == field.default}  # fmt: skip
        static_masking = objective.model_dump(mode="json", exclude=later)
    return SampleSettings(
        sample_format=data.sample_format,
        seq_length=objective.sample_length(data),
        num_duplicates=1 if held_out else data.passes,
        seed=HELD_OUT_SEED if held_out else settings.seed,
        packing=data.shares_rows,
        max_sequences_per_row=data.sequences_per_row,
        static_masking=static_masking,
        own=sample_format.own_settings(data),
    )

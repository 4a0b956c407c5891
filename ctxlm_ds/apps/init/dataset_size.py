"""Size of a dataset that a new recipe trains on."""

from __future__ import annotations

from pathlib import Path

from ctxlm_ds.errors import ConfigError


def num_rows(prefix: str, seq_length: int) -> int:
    """Return about how many rows of `seq_length` tokens a dataset (a prefix) fills.

    Raises ConfigError if there is no such dataset.
    """
    if not Path(f"{prefix}.idx").is_file():
        raise ConfigError(f"{prefix}: no such dataset (no {prefix}.idx); preprocess makes one")
    from ctxlm_ds.data.dataset.index_file import read_index

    tokens = int(read_index(Path(f"{prefix}.idx")).lengths.sum(dtype="int64"))
    return max(1, tokens // seq_length)

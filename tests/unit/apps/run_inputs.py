"""The recipe of the fixture `route`, and what a checkpoint keeps of its data."""

from __future__ import annotations

from pathlib import Path

from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return load_config(folder / "recipe.json", overrides)


def rows_of(config: RunConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """What a checkpoint keeps of the data: indexes by content."""
    rows = build_run_rows(config.row_settings, tokenizer, build_objective(config.objective, tokenizer))
    return rows.describe(config.data.train, tokenizer)

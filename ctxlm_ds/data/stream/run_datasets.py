"""All rows of a run: its training sources as one row space, its held-out sources by name.

In: a recipe, its tokenizer, its objective. Out: open sample indexes, built where they are missing, and what a
checkpoint keeps of them. Not here: one index (index/), their order (blend.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctxlm_ds.data.fields import Objective
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.stream.splits import held_out_parts, refuse_copies, refuse_overlap, train_parts
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.schema import RunConfig

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class RunRows:
    """The sample indexes of a run."""

    train: RowSource
    """One index for each of data.train, in its order."""
    validation: Mapping[str, RowSource]

    def describe(self, config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
        """What a resume must find again to be at the same place of the same stream."""
        sources = [
            {
                "path": source.path,
                "documents": index.meta["dataset"]["documents"],
                "rows": len(index),
                "index": index.meta["key"],
            }
            for source, index in zip(config.data.train, self.train.indexes, strict=True)
        ]
        return {"sources": sources, "tokenizer_fingerprint": tokenizer.fingerprint}


def build_run_rows(
    config: RunConfig, tokenizer: Tokenizer, objective: Objective, workers: int | None = None, verify: bool = True
) -> RunRows:
    """The sample indexes of the training and held-out sources, built where they are missing (by `workers` threads).

    Args:
        verify: compare the checksums of the indexes that are there already.

    Raises:
        ConfigError: no training data is named.
        DataError: a dataset or an index is missing, damaged or made with another tokenizer; a training source is a copy
            of another one; or held-out documents of a split are trained on.
    """
    if not config.data.train:
        raise ConfigError(
            "data.train is empty: name one or more dataset prefixes made by tools/preprocess_data.py, e.g. "
            "--set data.train=[data/wiki_text_sentence]"
        )
    train = build_rows(train_parts(config), tokenizer, config, objective, workers=workers, verify=verify)
    refuse_copies(train, config)
    held_out = {
        name: build_rows([part], tokenizer, config, objective, held_out=True, workers=workers, verify=verify)
        for name, part in held_out_parts(config).items()
    }
    refuse_overlap(train, held_out, config)
    return RunRows(train, held_out)

"""Rows of a dataset for people to look at, without leaving an index beside it.

In: a dataset, a recipe. Out: its rows under the recipe: of the whole index if that has been built, else of its first
documents alone, from an index in a temporary folder. Not here: showing them (stream/preview.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ctxlm_ds.data.fields import Objective
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.index.location import IndexPlace, open_rows
from ctxlm_ds.data.index.record import SourcePart
from ctxlm_ds.data.index.storage import META_NAME
from ctxlm_ds.recipe.schema import RunConfig

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

FEWEST_DOCUMENTS = 300
DOCUMENTS_A_ROW = 10


@contextmanager
def excerpt(
    prefix: str, tokenizer: Tokenizer, config: RunConfig, objective: Objective, rows_wanted: int
) -> Iterator[tuple[RowSource, str]]:
    """Rows while the context lasts, and a line that says of which documents they are.

    Raises:
        DataError: the dataset does not fit the tokenizer or the sample format.
    """
    place = IndexPlace.of(prefix, tokenizer, config)
    total = place.dataset.num_documents
    if (place.directory / META_NAME).exists():
        yield open_rows([prefix], tokenizer, config), f"rows of all {total:,} documents, from {place.directory}"
        return
    count = min(total, max(FEWEST_DOCUMENTS, DOCUMENTS_A_ROW * rows_wanted))
    told = f"rows of all {total:,} documents"
    if count < total:
        told = (
            f"rows of the first {count:,} of {total:,} documents alone, made as training makes them: a run on all of "
            "them has other rows and masks (tools/build_samples.py --show shows those)"
        )
    with tempfile.TemporaryDirectory(prefix="samples-") as folder:
        data = config.data.model_copy(update={"sample_index_dir": folder})
        part = SourcePart(prefix, (0, count))
        yield build_rows([part], tokenizer, config.model_copy(update={"data": data}), objective), told

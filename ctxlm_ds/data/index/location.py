"""Where sample indexes lie, and opening those that exist (index.py says what one holds, build.py makes them).

In: sources (a dataset, or a range of its documents), a tokenizer, a recipe. Out: open indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.index.index import RowSource, SampleIndex
from ctxlm_ds.data.index.record import SampleSettings, Source, as_part, sample_settings
from ctxlm_ds.data.index.sentence_table import require_sentence_encoding
from ctxlm_ds.data.index.storage import META_NAME
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FORMATS

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

BUILD_COMMAND = "tools/build_samples.py --config RECIPE.yaml"


def open_rows(parts: Sequence[Source], tokenizer: Tokenizer, config: RunConfig, held_out: bool = False) -> RowSource:
    """Open the indexes of sources, which must have been built, as one row space.

    Raises:
        DataError: an index is missing or damaged, a dataset does not fit the tokenizer, or there is no row at all.
    """
    if not parts:
        raise DataError("no dataset is named; set data.train to one or more prefixes made by tools/preprocess_data.py")
    return RowSource([open_sample_index(part, tokenizer, config, held_out) for part in parts])


def open_sample_index(part: Source, tokenizer: Tokenizer, config: RunConfig, held_out: bool = False) -> SampleIndex:
    """Open the index of one source that `build_sample_index` has built, here or in another process.

    Raises:
        DataError: it does not exist or is damaged, or the dataset does not fit the tokenizer.
    """
    place = IndexPlace.of(part, tokenizer, config, held_out)
    if not (place.directory / META_NAME).exists():
        raise DataError(f"{place.directory}: no sample index for this recipe; build it with {BUILD_COMMAND}")
    return place.open(tokenizer)


@dataclass(frozen=True)
class IndexPlace:
    """A source, the settings of its index, and the folder where that lies."""

    dataset: IndexedDataset
    documents: tuple[int, int]
    """First document, and the one after the last."""
    settings: SampleSettings
    directory: Path
    key: str

    @classmethod
    def of(cls, part: Source, tokenizer: Tokenizer, config: RunConfig, held_out: bool = False) -> IndexPlace:
        """The place of a source's index under a recipe.

        Raises:
            DataError: the dataset is missing, damaged or made with another tokenizer, or has no such documents.
        """
        part, data = as_part(part), config.data
        dataset = open_dataset(part.prefix, tokenizer)
        joins = FORMATS.get(data.sample_format)().joins_sentences(data)
        require_sentence_encoding(dataset, tokenizer.sentence_prefix, joins, f"data.sample_format {data.sample_format}")
        documents = (0, dataset.num_documents) if part.documents is None else part.documents
        if not 0 <= documents[0] <= documents[1] <= dataset.num_documents:
            raise DataError(
                f"{part.prefix}: documents {documents[0]} to {documents[1]} are asked for, it has "
                f"{dataset.num_documents}"
            )
        settings = sample_settings(config, held_out)
        key = settings.key(dataset.fingerprint, documents, tokenizer.fingerprint)
        prefix, parent = Path(dataset.prefix), data.sample_index_dir
        directory = (Path(parent) if parent else prefix.parent) / f"{prefix.name}.samples-{key[:12]}"
        return cls(dataset, documents, settings, directory, key)

    def open(self, tokenizer: Tokenizer) -> SampleIndex:
        """Open the index that lies here (SampleIndex says what is checked)."""
        return SampleIndex(self.directory, self.dataset, SequenceTemplate.of(tokenizer), self.key)


def open_dataset(prefix: str | Path, tokenizer: Tokenizer) -> IndexedDataset:
    """Open a dataset, refusing one that another tokenizer made (Megatron's carry no fingerprint to compare)."""
    dataset = IndexedDataset(prefix)
    made_with = (dataset.metadata or {}).get("tokenizer_fingerprint")
    if made_with is not None and made_with != tokenizer.fingerprint:
        raise DataError(
            f"{prefix}: made with another tokenizer (fingerprint {made_with[:12]}, the recipe's is "
            f"{tokenizer.fingerprint[:12]}); set tokenizer.path to that one, or run tools/preprocess_data.py again"
        )
    return dataset

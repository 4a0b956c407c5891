"""A dataset as a person reads it: its figures, and documents as text with the sentence boundaries visible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer

_MAX_SHOWN_TOKENS = 4096
_MAX_SHOWN_NAMES = 8
_BLOCK_ITEMS = 1 << 20


def open_tokenizer(dataset: IndexedDataset, tokenizer_path: str | Path | None) -> Tokenizer | None:
    """The tokenizer given, else the one the dataset names, else None; it must be the one that made the dataset.

    Raises TokenizerError for an unreadable folder, DataError where the fingerprints differ.
    """
    metadata = dataset.metadata or {}
    path = tokenizer_path or metadata.get("tokenizer_path")
    if not path or (tokenizer_path is None and not Path(path).is_dir()):
        return None
    tokenizer = load_tokenizer(path)
    recorded = metadata.get("tokenizer_fingerprint")
    if recorded is not None and tokenizer.fingerprint != recorded:
        raise DataError(
            f"{dataset.prefix}: made with a tokenizer of fingerprint {recorded[:12]}, {path} has "
            f"{tokenizer.fingerprint[:12]}; name the right folder with --tokenizer"
        )
    return tokenizer


def describe(dataset: IndexedDataset) -> Iterator[str]:
    """The dataset's figures, a line each."""
    metadata = dataset.metadata or {}
    unit = "sentence" if metadata.get("split_sentences") else "sequence"
    yield f"dataset       {dataset.prefix}"
    yield f"documents     {dataset.num_documents:,}" + _skipped(metadata)
    yield f"{unit + 's':13} {dataset.num_sequences:,}"
    yield f"tokens        {dataset.num_tokens:,} ({dataset.dtype.name}, {dataset.tokens.nbytes / 1e6:,.1f} MB)"
    if dataset.num_documents:
        sequences, tokens = _Spread(dataset.num_documents), _Spread(dataset.num_documents)
        for first in range(0, dataset.num_documents, _BLOCK_ITEMS):
            sizes = dataset.document_sizes(first, min(first + _BLOCK_ITEMS, dataset.num_documents))
            sequences.add(sizes[0])
            tokens.add(sizes[1])
        yield f"a document    {tokens.text('tokens')}"
        yield f"              {sequences.text(unit + 's')}"
    if dataset.num_sequences:
        lengths = _Spread(dataset.num_sequences)
        for first in range(0, dataset.num_sequences, _BLOCK_ITEMS):
            lengths.add(dataset.lengths(first, min(first + _BLOCK_ITEMS, dataset.num_sequences)))
        yield f"a {unit:11} {lengths.text('tokens')}"
    if metadata:
        yield from _origin(metadata)
    yield f"fingerprint   {dataset.fingerprint[:12]}"


def _origin(metadata: dict[str, Any]) -> Iterator[str]:
    ending = f"yes (id {metadata.get('eod_id')})" if metadata.get("append_eod") else "no"
    yield f"end tokens    {ending}"
    yield f"tokenizer     {metadata.get('tokenizer_path')} ({metadata.get('vocab_size') or 0:,} tokens, " + (
        f"{metadata.get('tokenizer_kind')}, {str(metadata.get('tokenizer_fingerprint'))[:12]})"
    )
    inputs = metadata.get("inputs") or []
    more = f" and {len(inputs) - _MAX_SHOWN_NAMES} more" if len(inputs) > _MAX_SHOWN_NAMES else ""
    read_mb = (metadata.get("input_bytes") or 0) / 1e6
    yield f"made from     {', '.join(inputs[:_MAX_SHOWN_NAMES])}{more} ({read_mb:,.1f} MB)"
    for stage in metadata.get("cleaning") or []:
        dropped, reached = stage.get("dropped_documents"), stage.get("documents_in")
        counts = f": {dropped:,} of {reached:,} documents left out" if isinstance(dropped, int) and reached else ""
        yield f"cleaned       {stage.get('stage')}{counts}"
    parts = metadata.get("parts") or []
    if parts:
        yield f"joined from   {len(parts)} parts, {parts[0].get('name')} to {parts[-1].get('name')}"


def _skipped(metadata: dict[str, Any]) -> str:
    parts = [
        f"{metadata[key]:,} {name} left out"
        for key, name in (("empty_documents", "empty"), ("bad_records", "bad records"))
        if metadata.get(key)
    ]
    return f" ({', '.join(parts)})" if parts else ""


class _Spread:
    """Least, mean and most of numbers that come in blocks; quantiles of an even sample of up to a million of them."""

    def __init__(self, count: int) -> None:
        self._stride = -(-count // _BLOCK_ITEMS)
        self._sampled: list[NDArray[np.int64]] = []
        self._low, self._high, self._sum, self._count = 2**63, 0, 0, 0

    def add(self, values: NDArray[np.int64]) -> None:
        self._sampled.append(values[-self._count % self._stride :: self._stride].copy())
        self._low, self._high = min(self._low, int(values.min())), max(self._high, int(values.max()))
        self._sum += int(values.sum())
        self._count += len(values)

    def text(self, unit: str) -> str:
        median, most = np.quantile(np.concatenate(self._sampled), [0.5, 0.95])
        mean = self._sum / self._count
        return (
            f"{self._low:,} to {self._high:,} {unit}, median {median:,.0f}, mean {mean:,.1f}, 95 % up to {most:,.0f}"
        )


def show_documents(dataset: IndexedDataset, tokenizer: Tokenizer | None, count: int, first: int = 0) -> Iterator[str]:
    """`count` documents from `first` as text, a numbered line for each sentence; as ids without a tokenizer.

    Raises DataError where there is no document `first`.
    """
    if dataset.num_documents and not 0 <= first < dataset.num_documents:
        raise DataError(f"{dataset.prefix}: has documents 0 to {dataset.num_documents - 1}, not {first}")
    for document in range(first, min(first + count, dataset.num_documents)):
        yield ""
        yield f"document {document}: {int(dataset.document_sizes(document, document + 1)[0][0])} sequences"
        for number, tokens in enumerate(dataset.document(document), start=1):
            shown = tokens[:_MAX_SHOWN_TOKENS].tolist()
            text = " ".join(map(str, shown)) if tokenizer is None else _one_line(tokenizer.decode(shown))
            cut = f" … ({len(tokens) - len(shown):,} more tokens)" if len(tokens) > len(shown) else ""
            yield f"  [{number}] ({len(tokens)}) {text}{cut}"


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎").strip(" ")

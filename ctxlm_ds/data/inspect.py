"""A dataset as a person reads it: its figures, and documents as text with the sentence boundaries visible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.indexed import IndexedDataset
from ctxlm_ds.errors import DataError
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer

_MAX_SHOWN_TOKENS = 4096


def open_tokenizer(dataset: IndexedDataset, tokenizer_path: str | Path | None) -> Tokenizer | None:
    """The tokenizer given, else the one the dataset names, else None; it must be the one that made the dataset.

    Raises TokenizerError for an unreadable folder, DataError where the fingerprints differ.
    """
    metadata = dataset.metadata or {}
    path = tokenizer_path or metadata.get("tokenizer_path")
    if path is None or (tokenizer_path is None and not Path(path).is_dir()):
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
    sizes = np.diff(dataset.document_indices)
    if sizes.size:
        starts = dataset.sequence_starts[dataset.document_indices]
        yield f"a document    {_spread(np.diff(starts), 'tokens')}"
        yield f"              {_spread(sizes, unit + 's')}"
    if dataset.num_sequences:
        yield f"a {unit:11} {_spread(dataset.sequence_lengths, 'tokens')}"
    if metadata:
        ending = f"yes (id {metadata.get('eod_id')})" if metadata.get("append_eod") else "no"
        yield f"end tokens    {ending}"
        yield f"tokenizer     {metadata.get('tokenizer_path')} ({metadata.get('vocab_size'):,} tokens, " + (
            f"{metadata.get('tokenizer_kind')}, {str(metadata.get('tokenizer_fingerprint'))[:12]})"
        )
        yield f"made from     {', '.join(metadata.get('inputs', []))} ({metadata.get('input_bytes', 0) / 1e6:,.1f} MB)"
    yield f"fingerprint   {dataset.fingerprint[:12]}"


def _skipped(metadata: dict[str, object]) -> str:
    parts = [
        f"{metadata[key]:,} {name} left out"
        for key, name in (("empty_documents", "empty"), ("bad_records", "bad records"))
        if metadata.get(key)
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _spread(values: NDArray[np.integer], unit: str) -> str:
    quantiles = np.quantile(values, [0.0, 0.5, 0.95, 1.0])
    low, median, high, most = (f"{value:,.0f}" for value in quantiles)
    return f"{low} to {most} {unit}, median {median}, mean {values.mean():,.1f}, 95 % up to {high}"


def show_documents(dataset: IndexedDataset, tokenizer: Tokenizer | None, count: int, first: int = 0) -> Iterator[str]:
    """`count` documents from `first` as text, a numbered line for each sentence; as ids without a tokenizer.

    Raises DataError where there is no document `first`.
    """
    if dataset.num_documents and not 0 <= first < dataset.num_documents:
        raise DataError(f"{dataset.prefix}: has documents 0 to {dataset.num_documents - 1}, not {first}")
    for document in range(first, min(first + count, dataset.num_documents)):
        begin, end = dataset.document_indices[document], dataset.document_indices[document + 1]
        yield ""
        yield f"document {document}: {end - begin} sequences"
        for number, tokens in enumerate(dataset.document(document), start=1):
            shown = tokens[:_MAX_SHOWN_TOKENS].tolist()
            text = " ".join(map(str, shown)) if tokenizer is None else _one_line(tokenizer.decode(shown))
            cut = f" … ({len(tokens) - len(shown):,} more tokens)" if len(tokens) > len(shown) else ""
            yield f"  [{number}] ({len(tokens)}) {text}{cut}"


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎").strip(" ")

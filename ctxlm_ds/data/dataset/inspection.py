"""Describe a dataset, show its documents as text, and verify every byte: checksums, ids, and the text itself.

Opening has checked the structure already (reader.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.console import byte_progress, counted
from ctxlm_ds.data.dataset.metadata import file_digest, manifest_path, write_manifest
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.problems import shortened
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer

_BLOCK_TOKENS = 1 << 22
_SAMPLED_SEQUENCES = 64
_MAX_SAMPLED_TOKENS = 4096
_MIN_SAMPLED_TOKENS = 8
"""Shorter sequences give the same ids with almost any vocabulary."""
_LEAST_SAME = 0.5
"""Share of sampled sequences below which a tokenizer cannot have made the dataset.

Measured on English Wikipedia: 100 % with the right one, 9 % and 57 % (short sequences counted) with a wrong one.
"""
_MAX_SHOWN_TOKENS, _MAX_SHOWN_SEQUENCES, _MAX_SHOWN_NAMES = 200, 20, 8
_BLOCK_ITEMS = 1 << 20
MOST_UNKNOWN = 0.01
"""Share of unknown tokens above which there is a warning."""


def open_tokenizer(dataset: IndexedDataset, tokenizer_path: str | Path | None) -> Tokenizer | None:
    """Return the tokenizer given, else the one that the dataset names, else None.

    Raises TokenizerError for an unreadable folder, DataError if it is not the one that made the dataset.
    """
    metadata = dataset.metadata or {}
    path = tokenizer_path or metadata.get("tokenizer_path")
    if not path or (tokenizer_path is None and not os.path.exists(path)):
        return None
    tokenizer = load_tokenizer(path, metadata.get("split_special_tokens"))
    recorded = metadata.get("tokenizer_fingerprint")
    if recorded is not None and tokenizer.fingerprint != recorded:
        raise DataError(
            f"{dataset.prefix}: made with a tokenizer of fingerprint {recorded[:12]}, {path} has "
            f"{tokenizer.fingerprint[:12]}; name the right folder with --tokenizer"
        )
    return tokenizer


def describe(dataset: IndexedDataset) -> Iterator[str]:
    """Yield the dataset's figures, one per line."""
    metadata = dataset.metadata or {}
    unit = "sentence" if metadata.get("split_sentences") else "sequence"
    yield f"dataset       {dataset.prefix}"
    skipped = [
        f"{metadata[key]:,} {name} left out"
        for key, name in (("empty_documents", "empty"), ("bad_records", "bad records"))
        if metadata.get(key)
    ]
    yield f"documents     {dataset.num_documents:,}" + (f" ({', '.join(skipped)})" if skipped else "")
    yield f"{unit + 's':13} {dataset.num_sequences:,}"
    yield f"tokens        {dataset.num_tokens:,} ({dataset.dtype.name}, {dataset.tokens.nbytes / 1e6:,.1f} MB)"
    if count := dataset.num_documents:
        yield f"a document    {_spread(dataset.document_tokens, count, 'tokens')}"
        yield f"              {_spread(dataset.document_sequences, count, unit + 's')}"
    if count := dataset.num_sequences:
        yield f"a {unit:11} {_spread(dataset.lengths, count, 'tokens')}"
    if metadata:
        yield from _origin(metadata)
    yield f"fingerprint   {dataset.fingerprint[:12]}"


def count_unknown(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> tuple[int, int] | None:
    """Return the unknown tokens and the tokens that were counted; None if they cannot be.

    They are recorded in the JSON. Without a record, the first tokens are counted with the tokenizer.
    """
    recorded = (dataset.metadata or {}).get("unknown_tokens")
    if recorded is not None:
        return int(recorded), dataset.num_tokens
    if tokenizer is None or tokenizer.unk_id == tokenizer.eod_id:
        return None
    tokens = dataset.tokens[:_BLOCK_TOKENS]
    return int(np.count_nonzero(tokens == tokenizer.unk_id)), len(tokens)


def unknown_advice(unknown: int, tokens: int, metadata: Mapping[str, Any] | None) -> str:
    """Return a warning if many tokens are unknown, with the cause that the dataset's JSON names, else nothing."""
    if unknown <= MOST_UNKNOWN * tokens:
        return ""
    cause = (metadata or {}).get("unknown_cause")
    return f"{unknown / tokens:.1%} of the tokens are unknown, their text is lost" + (f"; {cause}" if cause else "")


def _origin(metadata: dict[str, Any]) -> Iterator[str]:
    words = metadata.get("words")
    yield f"words         {'not counted, preprocess again' if words is None else f'{words:,}'}"
    if metadata.get("spans_key"):
        yield f"given spans   from the key {metadata['spans_key']}"
    ending = f"yes (id {metadata.get('eod_id')})" if metadata.get("append_eod") else "no"
    yield f"end tokens    {ending}"
    yield f"tokenizer     {metadata.get('tokenizer_path')} ({metadata.get('vocab_size') or 0:,} tokens, " + (
        f"{metadata.get('tokenizer_kind')}, {str(metadata.get('tokenizer_fingerprint'))[:12]})"
    )
    inputs = metadata.get("inputs") or []
    more = f" and {len(inputs) - _MAX_SHOWN_NAMES} more" if len(inputs) > _MAX_SHOWN_NAMES else ""
    read_mb = (metadata.get("input_bytes") or 0) / 1e6
    yield f"made from     {', '.join(inputs[:_MAX_SHOWN_NAMES])}{more} ({read_mb:,.1f} MB)"
    parts = metadata.get("parts") or []
    if parts:
        yield f"joined from   {len(parts)} parts, {parts[0].get('name')} to {parts[-1].get('name')}"


def _spread(read: Callable[[int, int], NDArray[np.int64]], count: int, unit: str) -> str:
    """Describe `count` numbers, read in blocks; quantiles are those of an even sample of up to a million."""
    stride = -(-count // _BLOCK_ITEMS)
    lows, highs, total, samples = [], [], 0, []
    for first in range(0, count, _BLOCK_ITEMS):
        block = read(first, min(first + _BLOCK_ITEMS, count))
        lows.append(int(block.min()))
        highs.append(int(block.max()))
        total += int(block.sum())
        samples.append(block[::stride].copy())
    median, most = np.quantile(np.concatenate(samples), [0.5, 0.95])
    return (
        f"{min(lows):,} to {max(highs):,} {unit}, median {median:,.0f}, mean {total / count:,.1f}, "
        f"95 % up to {most:,.0f}"
    )


def show_documents(dataset: IndexedDataset, tokenizer: Tokenizer | None, count: int, first: int = 0) -> Iterator[str]:
    """Yield `count` documents from `first` as text, a numbered line per sentence; as ids without a tokenizer.

    Raises DataError if there is no document `first`.
    """
    if dataset.num_documents and not 0 <= first < dataset.num_documents:
        raise DataError(f"{dataset.prefix}: has documents 0 to {dataset.num_documents - 1}, not {first}")
    for document in range(first, min(first + count, dataset.num_documents)):
        yield ""
        sequences = list(dataset.document(document))
        yield f"document {document}: {len(sequences)} sequences"
        for number, tokens in enumerate(sequences[:_MAX_SHOWN_SEQUENCES], start=1):
            shown = tokens[:_MAX_SHOWN_TOKENS].tolist()
            text = " ".join(map(str, shown)) if tokenizer is None else tokenizer.decode(shown)
            text = text.replace("\n", "⏎").strip(" ")
            cut = f" … ({len(tokens) - len(shown):,} more tokens)" if len(tokens) > len(shown) else ""
            yield f"  [{number}] ({len(tokens)}) {text}{cut}"
        if len(sequences) > _MAX_SHOWN_SEQUENCES:
            left = sequences[_MAX_SHOWN_SEQUENCES:]
            yield f"  … ({len(left):,} more sequences, {sum(map(len, left)):,} tokens)"


def verify_dataset(dataset: IndexedDataset, tokenizer_path: str | Path | None = None, write: bool = False) -> list[str]:
    """Verify a dataset and return what was verified, one line each. Raises DataError at the first error.

    The tokenizer is the one given, else the one that the JSON names, if that still exists. With `write`,
    `PREFIX.sha256` is written at the end.
    """
    proofs = [
        f"structure: {dataset.num_sequences:,} sequences of {dataset.num_documents:,} documents are contiguous "
        f"and fill the .bin ({dataset.num_tokens:,} tokens of {dataset.dtype.name})"
    ]
    digest, lowest, highest = scan_tokens(dataset)
    proofs += _check_digests(dataset, digest)
    if dataset.has_spans:
        proofs.append(_spans_proof(dataset))
    tokenizer, metadata = open_tokenizer(dataset, tokenizer_path), dataset.metadata or {}
    recorded, path = metadata.get("tokenizer_fingerprint"), tokenizer_path or metadata.get("tokenizer_path")
    if recorded is None:
        proofs.append("tokenizer: none recorded")
    elif tokenizer is None:
        missing = f"{path} is not here; fingerprint {recorded[:12]} not compared (name it with --tokenizer)"
        proofs.append(f"tokenizer: {missing}")
    else:
        proofs.append(f"tokenizer: {path} has the recorded fingerprint {recorded[:12]}")
    vocab_size = metadata.get("vocab_size")
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        raise DataError(
            f"{dataset_file(dataset.prefix, 'bin')}: ids from {lowest} to {highest}, the vocabulary has 0 to "
            f"{'?' if vocab_size is None else vocab_size - 1}; the file is damaged or was made with another tokenizer"
        )
    bound = "" if vocab_size is None else f", all below the vocabulary's {vocab_size:,}"
    proofs.append(f"ids: {lowest} to {highest}{bound}")
    proofs.append(_text_proof(dataset, tokenizer))
    if write:
        digests = {"bin": digest, "idx": dataset.index_digest}
        for extension in ("json", "spans"):
            if (path := dataset_file(dataset.prefix, extension)).is_file():
                digests[extension] = file_digest(path)
        proofs.append(f"manifest: {write_manifest(dataset.prefix, digests)} written; `sha256sum -c` reads it too")
    elif not manifest_path(dataset.prefix).is_file():
        proofs.append(f"manifest: none ({manifest_path(dataset.prefix).name}); --write-manifest makes it")
    return proofs


def scan_tokens(dataset: IndexedDataset) -> tuple[str, int, int]:
    """Return the sha256 (hex) of .bin, the lowest and the highest id (0, 0 without tokens)."""
    digest = hashlib.sha256()
    lows, highs = [], []
    with ThreadPoolExecutor(1) as hashing, byte_progress("verify", dataset.tokens.nbytes) as progress:
        for first in range(0, dataset.num_tokens, _BLOCK_TOKENS):
            block = dataset.tokens[first : first + _BLOCK_TOKENS]
            hashed = hashing.submit(digest.update, block.data)
            lows.append(int(block.min()))
            highs.append(int(block.max()))
            hashed.result()
            progress.update((first + block.size) * dataset.dtype.itemsize)
    return digest.hexdigest(), min(lows, default=0), max(highs, default=0)


def _check_digests(dataset: IndexedDataset, bin_digest: str) -> list[str]:
    proofs = []
    dataset.check_recorded("bin", bin_digest)
    dataset.check_recorded("idx", dataset.index_digest)
    for where, recorded in dataset.recorded_digests():
        # The JSON's own line in the manifest was checked when the dataset was opened.
        names = [f".{extension}" for extension in ("bin", "idx", "json") if extension in recorded]
        if names:
            proofs.append(f"checksums: sha256 of {', '.join(names)} equal those in {where.name}")
    return proofs or ["checksums: none recorded (a dataset of Megatron)"]


def _spans_proof(dataset: IndexedDataset) -> str:
    """Return how many tokens the given spans have. Raises DataError if .spans is damaged."""
    flags, in_spans, spans = dataset.continues_span, 0, 0
    path = dataset_file(dataset.prefix, "spans")
    dataset.check_recorded("spans", file_digest(path))
    starts = np.unique(dataset.first_tokens(np.arange(dataset.num_sequences)))
    if flags.max(initial=0) > 1 or flags[starts[starts < len(flags)]].any():
        raise DataError(f"{path}: not a flag for each token, 0 at the first of each sequence; it is damaged")
    for first in range(0, len(flags), _BLOCK_TOKENS):
        block = flags[first : first + _BLOCK_TOKENS]
        before = flags[first - 1 : first - 1 + len(block)] if first else np.append(np.uint8(0), block[:-1])
        begun = int(np.count_nonzero(block > before))
        spans, in_spans = spans + begun, in_spans + begun + int(np.count_nonzero(block))
    share = in_spans / max(1, len(flags))
    return f"spans: {spans:,} of two or more tokens, {share:.1%} of the tokens; sha256 equals the recorded one"


def _text_proof(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> str:
    """Decode sequences, evenly spread over the dataset, and tokenize their text again; DataError if ids differ."""
    if tokenizer is None:
        return "text: not decoded (name the tokenizer with --tokenizer)"
    if tokenizer.backend.decoder is None:
        return "text: not compared (tokenizer.json has no decoder, so that ids do not give their text back)"
    metadata = dataset.metadata or {}
    spread = np.unique(np.linspace(0, len(dataset) - 1, min(_SAMPLED_SEQUENCES, len(dataset))).astype(np.int64))
    sampled = [dataset.sequence(number)[:_MAX_SAMPLED_TOKENS].tolist() for number in spread]
    sampled = [ids[:-1] if ids and ids[-1] == tokenizer.eod_id else ids for ids in sampled]
    sampled = [ids for ids in sampled if len(ids) >= _MIN_SAMPLED_TOKENS] or [ids for ids in sampled if ids]
    if metadata.get("prepend_bos"):
        sampled = [ids[ids[0] == tokenizer.cls_id :] for ids in sampled]
    known = [ids for ids in sampled if tokenizer.unk_id not in ids or tokenizer.unk_id == tokenizer.eod_id]
    if not known:
        return f"text: not compared ({counted(len(sampled), 'sampled sequence')}, all with unknown words)"
    texts = [tokenizer.decode(ids) for ids in known]
    same = [
        # A sequence that was cut may end inside a word.
        again[: len(ids) - 16] == ids[:-16] if len(ids) >= _MAX_SAMPLED_TOKENS - 1 else again == ids
        for ids, again in zip(known, tokenizer.encode_batch(texts), strict=True)
    ]
    share = f"{sum(same)} of {len(same)} sampled sequences"
    example = shortened(" ".join(texts[same.index(True) if any(same) else 0].split()))
    if sum(same) < _LEAST_SAME * len(same):
        is_known = metadata.get("tokenizer_fingerprint") is not None
        remedy = "preprocess it again" if is_known else "name the tokenizer that made the dataset with --tokenizer"
        short = f"{dataset.prefix}: only {share} are what this tokenizer makes of their text"
        raise DataError(f"{short} ({example!r}); {remedy}")
    left_out = f", {len(sampled) - len(known)} with unknown words were left out" if len(known) < len(sampled) else ""
    return f"text: {share} decode to text that gives the same ids again{left_out}: {example!r}"

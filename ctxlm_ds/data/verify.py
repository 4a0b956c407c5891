"""Prove a dataset whole: every byte read, ids inside the vocabulary, checksums, the tokenizer's fingerprint."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ctxlm_ds.data.indexed import IndexedDataset, dataset_file
from ctxlm_ds.errors import DataError

_BLOCK_TOKENS = 1 << 22


def verify_dataset(dataset: IndexedDataset, tokenizer_path: str | Path | None = None) -> list[str]:
    """What was proved, a line each (opening the dataset has proved its structure). Raises DataError at a failure.

    The tokenizer is the one given, else the one that the JSON names, where that folder still exists.
    """
    proofs = [
        f"structure: {dataset.num_sequences:,} sequences of {dataset.num_documents:,} documents lie one after another "
        f"and fill the .bin ({dataset.num_tokens:,} tokens of {dataset.dtype.name})"
    ]
    metadata = dataset.metadata
    bin_digest, lowest, highest = _scan_tokens(dataset)
    if metadata is None:
        proofs.append("checksums: none recorded (no JSON beside the files: a dataset made by Megatron)")
    else:
        recorded = metadata.get("sha256", {})
        idx_digest = _file_digest(dataset_file(dataset.prefix, "idx"))
        for extension, digest in (("bin", bin_digest), ("idx", idx_digest)):
            if recorded.get(extension) != digest:
                raise DataError(
                    f"{dataset_file(dataset.prefix, extension)}: sha256 {digest[:16]}, recorded "
                    f"{str(recorded.get(extension))[:16]}; the file was changed after it was made, copy it again"
                )
        proofs.append("checksums: sha256 of .bin and .idx equal the recorded ones")
    vocab_size = None if metadata is None else metadata.get("vocab_size")
    proofs.append(_check_tokenizer(dataset, tokenizer_path))
    if tokenizer_path is not None and vocab_size is None:
        vocab_size = _vocab_size(tokenizer_path)
    _check_ids(dataset, lowest, highest, vocab_size)
    bound = "" if vocab_size is None else f", all below the vocabulary's {vocab_size:,}"
    proofs.append(f"ids: {lowest} to {highest}{bound}")
    return proofs


def _scan_tokens(dataset: IndexedDataset) -> tuple[str, int, int]:
    """sha256 of .bin, lowest and highest id."""
    digest = hashlib.sha256()
    lowest, highest = 0, 0
    for first in range(0, dataset.num_tokens, _BLOCK_TOKENS):
        block = dataset.tokens[first : first + _BLOCK_TOKENS]
        digest.update(block.data)
        low, high = int(block.min()), int(block.max())
        lowest, highest = (low, high) if first == 0 else (min(lowest, low), max(highest, high))
    return digest.hexdigest(), lowest, highest


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _check_ids(dataset: IndexedDataset, lowest: int, highest: int, vocab_size: int | None) -> None:
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        raise DataError(
            f"{dataset_file(dataset.prefix, 'bin')}: ids from {lowest} to {highest}, the vocabulary has 0 to "
            f"{'?' if vocab_size is None else vocab_size - 1}; the file is damaged or was made with another tokenizer"
        )


def _vocab_size(tokenizer_path: str | Path) -> int:
    from ctxlm_ds.tokenizers.load import load_tokenizer

    return load_tokenizer(tokenizer_path).vocab_size


def _check_tokenizer(dataset: IndexedDataset, tokenizer_path: str | Path | None) -> str:
    metadata = dataset.metadata or {}
    recorded = metadata.get("tokenizer_fingerprint")
    path = tokenizer_path or metadata.get("tokenizer_path")
    if recorded is None:
        return "tokenizer: none recorded"
    if tokenizer_path is None and (path is None or not Path(path).is_dir()):
        return f"tokenizer: {path} is not here; fingerprint {recorded[:12]} not compared (name it with --tokenizer)"
    from ctxlm_ds.tokenizers.load import load_tokenizer

    present = load_tokenizer(str(path)).fingerprint
    if present != recorded:
        raise DataError(
            f"{dataset.prefix}: made with a tokenizer of fingerprint {recorded[:12]}, {path} has {present[:12]}; "
            "name the right folder with --tokenizer, or preprocess the text again"
        )
    return f"tokenizer: {path} has the recorded fingerprint {recorded[:12]}"

"""Settings of preprocessing, names of its results, and the key that is equal for equal builds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ctxlm_ds.data.preprocess.sentences import SPLITTER_VERSION
from ctxlm_ds.data.sources.types import WHOLE_INPUT, InputShard

BUILD_VERSION = 4
"""Raised whenever the same input and settings give other bytes."""
_NOT_IN_KEY = ("workers", "max_bad_records", "overwrite", "shard", "document")  # the signature covers the last


@dataclass(frozen=True, slots=True)
class PreprocessConfig:
    """Settings of preprocessing, named like Megatron's flags."""

    json_keys: tuple[str, ...] = ("text",)
    """Keys (columns) of a record to take; each gives a dataset."""
    join_keys: bool = False
    """The texts of all keys are the sequences of one document, in one dataset (given pairs)."""
    split_sentences: bool = False
    """A sequence is a sentence; otherwise it is a document."""
    keep_newlines: bool = False
    """Sentences keep the line ends behind them (only seen by tokenizers that have tokens for them)."""
    leading_space: bool = False
    """Sentences that follow another one are encoded with the space before them (byte-level BPE)."""
    append_eod: bool = False
    """The separator (`[SEP]`, `</s>`, `<|endoftext|>`) ends each document, counted in its last sequence's length."""
    prepend_bos: bool = False
    """The token that begins a text (`<s>`, `[CLS]`) begins each document."""
    split_special_tokens: bool = False
    """Encode the name of a special token inside a text as ordinary text (the name is transformers')."""
    workers: int = 1
    """Worker processes; the result does not depend on it."""
    max_bad_records: int = 0
    """Records that may be skipped because they are no documents."""
    input_format: str = "auto"
    """`auto` (by file name) or a format of sources/reading.py."""
    document: str = "blank"
    """What is a document of plain text: `line`, `lines:N`, `file`, or what stands between `blank` lines."""
    spans_key: str = ""
    """Key of the given spans of a record's text; empty without."""
    shard: InputShard = WHOLE_INPUT
    """The part of the input that this dataset holds."""
    overwrite: bool = False
    """Replace datasets that exist, once the new ones are complete."""


def dataset_keys(config: PreprocessConfig) -> tuple[str, ...]:
    """Return the name of each dataset: its key, or all keys joined by hyphens."""
    return ("-".join(config.json_keys),) if config.join_keys else config.json_keys


def dataset_prefix(output_prefix: str | Path, key: str, config: PreprocessConfig) -> str:
    """Return Megatron's name of a dataset, with the number of its shard."""
    kind = "sentence" if config.split_sentences else "document"
    shard = config.shard
    suffix = f"_shard{shard.index:05d}-of-{shard.count:05d}" if shard.count > 1 else ""
    return f"{output_prefix}_{key}_{kind}{suffix}"


def build_key(signature: str, fingerprint: str, config: PreprocessConfig) -> str:
    """Return a sha256 (hex) of everything that decides the bytes: equal keys, equal datasets."""
    settings = {key: value for key, value in asdict(config).items() if key not in _NOT_IN_KEY}
    for name in ("spans_key", "join_keys", "prepend_bos"):
        if not settings[name]:
            del settings[name]  # keys of datasets that are older than this setting
    settings |= {
        "version": BUILD_VERSION,
        "sources": signature,
        "tokenizer": fingerprint,
        "shard": [config.shard.index, config.shard.count],
    }
    if config.split_sentences:
        settings["sentence_splitter"] = SPLITTER_VERSION
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

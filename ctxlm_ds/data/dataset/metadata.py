"""The JSON beside a dataset: what made it, and the checksums of what was made. Read, and every field's type checked.

In: a prefix, and what its .bin and .idx hold. Out: the JSON's object, None where there is none (Megatron's datasets).
Not here: writing it (writer.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from ctxlm_ds.data.dataset.checksums import check_digest, file_digest, manifest_path, read_manifest
from ctxlm_ds.errors import DataError

METADATA_FORMAT = "ctxlm_ds-dataset"
METADATA_VERSION = 1
_MAX_BYTES = 1 << 28


class _Fields(BaseModel):
    """The types of the fields that this project writes; any may be absent, others pass."""

    model_config = ConfigDict(strict=True)

    tokenizer_fingerprint: str | None = None
    tokenizer_path: str | None = None
    tokenizer_kind: str | None = None
    sentence_prefix: str | None = None
    json_key: str | None = None
    build_key: str | None = None
    source_signature: str | None = None
    input_format: str | None = None
    vocab_size: NonNegativeInt | None = None
    eod_id: NonNegativeInt | None = None
    empty_documents: NonNegativeInt | None = None
    bad_records: NonNegativeInt | None = None
    input_bytes: NonNegativeInt | None = None
    characters: NonNegativeInt | None = None
    build_version: NonNegativeInt | None = None
    split_sentences: bool | None = None
    keep_newlines: bool | None = None
    append_eod: bool | None = None
    split_special_tokens: bool | None = None
    inputs: list[str] | None = None
    sources: list[str] | None = None
    json_keys: list[str] | None = None
    parts: list[dict[str, Any]] | None = None
    cleaning: list[dict[str, Any]] | None = None
    shard: list[NonNegativeInt] | None = None
    """[number, count]"""
    sha256: dict[str, str] | None = None


def read_metadata(prefix: str | Path, present: Mapping[str, object]) -> dict[str, Any] | None:
    """The object in `PREFIX.json`; `present` is what its counts must be.

    Raises DataError where the file is damaged, of another program or version, or belongs to other files; also where
    `PREFIX.sha256` lists another content for it.
    """
    path = Path(f"{prefix}.json")
    manifest = read_manifest(prefix)
    if not path.is_file():
        if manifest is not None and "json" in manifest:
            raise DataError(f"{path}: no such file, but {manifest_path(prefix)} lists it; copy it again")
        return None
    if path.stat().st_size > _MAX_BYTES:
        raise DataError(f"{path}: {path.stat().st_size:,} bytes do not describe a dataset; move it away or restore it")
    if manifest is not None and "json" in manifest:
        # A flipped bit in a number of the JSON is still JSON: only its checksum tells.
        where = manifest_path(prefix)
        remedy = f"restore it (changed on purpose: remove {where.name}, then tools/inspect_dataset.py --write-manifest)"
        check_digest(path, file_digest(path), manifest["json"], where, remedy)
    metadata = _parse(path)
    _check_types(path, metadata)
    for key, value in present.items():
        if metadata.get(key) != value:
            raise DataError(
                f"{path}: says {key} {metadata.get(key)!r}, the files hold {value!r}; they do not belong together, "
                "preprocess the text again"
            )
    return metadata


def _parse(path: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); restore it") from error
    if not isinstance(metadata, dict) or metadata.get("format") != METADATA_FORMAT:
        raise DataError(f"{path}: does not describe a dataset of this project; move it away or restore it")
    if metadata.get("version") != METADATA_VERSION:
        raise DataError(f"{path}: version {metadata.get('version')}, only {METADATA_VERSION} is known here")
    return metadata


def _check_types(path: Path, metadata: dict[str, Any]) -> None:
    remedy = "the file is damaged, restore it"
    try:
        fields = _Fields.model_validate(metadata)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        raise DataError(f"{path}: {key} is {str(metadata[key])[:60]!r} ({first['msg']}); {remedy}") from error
    if fields.shard and not (len(fields.shard) == 2 and fields.shard[0] < fields.shard[1]):
        raise DataError(f"{path}: shard is {str(fields.shard)[:60]}, not [number, count]; {remedy}")
    if None not in (fields.vocab_size, fields.eod_id) and fields.eod_id >= fields.vocab_size:  # type: ignore[operator]
        raise DataError(f"{path}: eod_id {fields.eod_id} is outside the vocabulary of {fields.vocab_size}; {remedy}")

"""Read the JSON of a dataset, which says what made it and holds checksums, and check the type of every field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from ctxlm_ds.data.dataset.checksums import check_digest, file_digest, manifest_path, read_manifest
from ctxlm_ds.errors import DataError
from ctxlm_ds.untrusted_json import read_json_object

METADATA_FORMAT = "ctxlm_ds-dataset"
METADATA_VERSION = 1
_MAX_BYTES = 1 << 28


class _Fields(BaseModel):
    """Types of the fields that this project writes; any may be absent, other fields pass."""

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
    sentence_splitter: NonNegativeInt | None = None
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
    """Return the object in `PREFIX.json`; None if there is none (Megatron's datasets).

    `present` is what its counts must be. Raises DataError if the file is damaged, of another program or version,
    belongs to other files, or if it and `PREFIX.sha256` record different checksums.
    """
    path, manifest, recorded = Path(f"{prefix}.json"), manifest_path(prefix), read_manifest(prefix)
    if not path.is_file():
        if recorded is not None and "json" in recorded:
            raise DataError(f"{path}: no such file, but {manifest} lists it; copy it again")
        return None
    if recorded is not None:
        restore = (
            f"restore it (changed on purpose: remove {manifest.name}, then tools/inspect_dataset.py --write-manifest)"
        )
        if "json" not in recorded:
            raise DataError(f"{manifest}: does not list {path.name}; the file is cut short, {restore}")
        # A flipped bit in one of its numbers is still JSON.
        check_digest(path, file_digest(path), recorded["json"], manifest, restore)
    metadata = read_json_object(path, DataError, _MAX_BYTES)
    if metadata.get("format") != METADATA_FORMAT:
        raise DataError(f"{path}: does not describe a dataset of this project; move it away or restore it")
    if metadata.get("version") != METADATA_VERSION:
        raise DataError(f"{path}: version {metadata.get('version')}, only {METADATA_VERSION} is known here")
    _check_types(path, metadata)
    for extension, digest in (metadata.get("sha256") or {}).items():
        if recorded is not None and recorded.get(extension) != digest:
            raise DataError(f"{manifest}: its sha256 of .{extension} is not the one in {path.name}; restore it")
    for key, value in present.items():
        if metadata.get(key) != value:
            raise DataError(
                f"{path}: says {key} {metadata.get(key)!r}, the files hold {value!r}; they do not belong together, "
                "preprocess the text again"
            )
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

"""The JSON beside a dataset: what made it, and the checksums of what was made. Read, and every field's type checked.

In: a prefix, and what its .bin and .idx hold. Out: the JSON's object, None where there is none (Megatron's datasets).
Not here: writing it (writer.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxlm_ds.data.dataset.checksums import check_digest, file_digest, manifest_path, read_manifest
from ctxlm_ds.errors import DataError

METADATA_FORMAT = "ctxlm_ds-dataset"
METADATA_VERSION = 1
_MAX_BYTES = 1 << 28
_TEXTS = (
    "tokenizer_fingerprint",
    "tokenizer_path",
    "tokenizer_kind",
    "sentence_prefix",
    "json_key",
    "build_key",
    "source_signature",
    "input_format",
)
_COUNTS = ("vocab_size", "eod_id", "empty_documents", "bad_records", "input_bytes", "characters", "build_version")
_LISTS_OF_TEXTS = ("inputs", "sources", "json_keys")
_SWITCHES = ("split_sentences", "keep_newlines", "append_eod")


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
    def require(key: str, kind: type, words: str) -> None:
        value = metadata.get(key)
        if value is not None and type(value) is not kind:
            raise DataError(f"{path}: {key} is {str(value)[:60]!r}, not {words}; the file is damaged, restore it")

    for key in _TEXTS:
        require(key, str, "a text")
    for key in _COUNTS:
        require(key, int, "a number")
        if (metadata.get(key) or 0) < 0:
            raise DataError(f"{path}: {key} is {metadata[key]}; the file is damaged, restore it")
    for key in _SWITCHES:
        require(key, bool, "true or false")
    for key in (*_LISTS_OF_TEXTS, "cleaning", "parts", "shard"):
        require(key, list, "a list")
    require("sha256", dict, "an object")
    texts = [text for key in _LISTS_OF_TEXTS for text in metadata.get(key) or []]
    if not all(isinstance(text, str) for text in [*texts, *(metadata.get("sha256") or {}).values()]):
        names = ", ".join(_LISTS_OF_TEXTS)
        raise DataError(f"{path}: {names} or sha256 hold something other than texts; the file is damaged, restore it")
    records = [*(metadata.get("parts") or []), *(metadata.get("cleaning") or [])]
    if not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path}: parts or cleaning hold something other than objects; the file is damaged, restore it")
    shard = metadata.get("shard") or [0, 1]
    if [type(number) for number in shard] != [int, int] or not 0 <= shard[0] < shard[1]:
        raise DataError(f"{path}: shard is {str(shard)[:60]}, not [number, count]; the file is damaged, restore it")
    vocab_size, eod_id = metadata.get("vocab_size"), metadata.get("eod_id")
    if vocab_size is not None and eod_id is not None and eod_id >= vocab_size:
        raise DataError(f"{path}: eod_id {eod_id} is outside the vocabulary of {vocab_size}; restore it")

"""The JSON of a dataset, which says what made it, and its checksums `PREFIX.sha256`, which prove a copy.

The checksums have the format of `sha256sum`: `sha256sum -c NAME.sha256`, run in the dataset's folder, reads them too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, NonNegativeInt, ValidationError, create_model

from ctxlm_ds.atomic import write_text
from ctxlm_ds.errors import DataError
from ctxlm_ds.untrusted_json import read_json_object, read_text

_MAX_MANIFEST_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20
_LINE = re.compile(r"\\?([0-9a-f]{64})  (.+)\.(bin|idx|json|spans)")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_WRITE_AGAIN = "remove it and write it again with ctxlm inspect --write-manifest"
METADATA_FORMAT = "ctxlm_ds-dataset"
METADATA_VERSION = 1
_MAX_BYTES = 1 << 28
_FIELDS: dict[Any, tuple[str, ...]] = {
    str: (
        "tokenizer_fingerprint", "tokenizer_path", "tokenizer_kind", "sentence_prefix", "json_key", "build_key",
        "source_signature", "input_format", "spans_key", "unknown_cause",
    ),
    NonNegativeInt: (
        "vocab_size", "eod_id", "empty_documents", "bad_records", "input_bytes", "characters", "build_version",
        "sentence_splitter", "unknown_tokens", "words",
    ),
    bool: ("split_sentences", "keep_newlines", "append_eod", "prepend_bos", "split_special_tokens"),
    list[str]: ("inputs", "sources", "json_keys"),
    list[dict[str, Any]]: ("parts",),
    list[NonNegativeInt]: ("shard",),
    dict[str, str]: ("sha256",),
}  # fmt: skip
"""Fields that this project writes, by type; any may be absent, other fields pass. A shard is [number, count]."""
_OPTIONAL: dict[str, Any] = {name: (kind | None, None) for kind, names in _FIELDS.items() for name in names}
_Metadata: Any = create_model("_Metadata", __config__=ConfigDict(strict=True), **_OPTIONAL)


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.sha256")


def dataset_manifest(prefix: str | Path, digests: Mapping[str, str]) -> str:
    """Return the text of `PREFIX.sha256` from digests by extension."""
    name = Path(prefix).name
    escaped = "".join(_ESCAPES.get(character, character) for character in name)
    mark = "\\" if escaped != name else ""  # sha256sum marks a line whose name is written with escapes
    return "".join(f"{mark}{digests[extension]}  {escaped}.{extension}\n" for extension in sorted(digests))


def read_manifest(prefix: str | Path) -> dict[str, str] | None:
    """Return the digests that `PREFIX.sha256` holds, by extension; None if there is no such file.

    The names in it may be those that the files had before they were renamed. Raises DataError if a byte of it is not
    what `write_manifest` writes.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    *lines, rest = read_text(path, DataError, _MAX_MANIFEST_BYTES).split("\n")
    matches = [match for line in lines if (match := _LINE.fullmatch(line))]
    digests = {match[3]: match[1] for match in matches}
    if (
        rest
        or not len(digests) == len(matches) == len(lines)
        or len({match[2] for match in matches}) != 1
        or not {"bin", "idx"} <= digests.keys()
    ):
        raise DataError(
            f"{path}: not the checksums of one dataset's .bin, .idx and .json as `sha256sum --text` writes them; the "
            f"file is damaged, copy it again, or {_WRITE_AGAIN}"
        )
    return digests


def check_digest(
    path: Path, digest: str, recorded: str, source: str | Path, remedy: str = "copy it or make it again"
) -> None:
    """Raise DataError if a file's sha256 is not the one that `source` records."""
    if digest != recorded:
        raise DataError(
            f"{path}: sha256 {digest[:16]}, {source} records {recorded[:16]}: the file was changed after it was made; "
            f"{remedy}"
        )


def write_manifest(prefix: str | Path, digests: Mapping[str, str]) -> Path:
    """Write `PREFIX.sha256` from digests by extension and return its path. Raises DataError if it exists."""
    if (path := manifest_path(prefix)).exists():
        raise DataError(f"{path}: exists already; remove it if the files were changed on purpose")
    write_text(path, dataset_manifest(prefix, digests))
    return path


def file_digest(path: Path) -> str:
    """Return the sha256 (hex) of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


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
        restore = f"restore it (changed on purpose: remove {manifest.name}, then ctxlm inspect --write-manifest)"
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
        fields = _Metadata.model_validate(metadata)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        raise DataError(f"{path}: {key} is {str(metadata[key])[:60]!r} ({first['msg']}); {remedy}") from error
    if fields.shard and not (len(fields.shard) == 2 and fields.shard[0] < fields.shard[1]):
        raise DataError(f"{path}: shard is {str(fields.shard)[:60]}, not [number, count]; {remedy}")
    if None not in (fields.vocab_size, fields.eod_id) and fields.eod_id >= fields.vocab_size:
        raise DataError(f"{path}: eod_id {fields.eod_id} is outside the vocabulary of {fields.vocab_size}; {remedy}")

"""The checksums of a dataset, `PREFIX.sha256`, in the format of `sha256sum`: they prove a copy.

`sha256sum -c NAME.sha256`, run in the dataset's folder, reads the same file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from ctxlm_ds.atomic import write_text
from ctxlm_ds.errors import DataError
from ctxlm_ds.untrusted_json import read_text

_MAX_MANIFEST_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20
_LINE = re.compile(r"\\?([0-9a-f]{64})  (.+)\.(bin|idx|json|spans)")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_WRITE_AGAIN = "remove it and write it again with ctxlm inspect --write-manifest"


def manifest_path(prefix: str | Path) -> Path:
    """Return `PREFIX.sha256`."""
    return Path(f"{prefix}.sha256")


def manifest_text(digests: Mapping[str, str]) -> str:
    """Return the manifest of files given as name (without folder) -> sha256 in hex, one line each."""
    lines = []
    for name, digest in digests.items():
        escaped = "".join(_ESCAPES.get(character, character) for character in name)
        mark = "\\" if escaped != name else ""  # sha256sum marks a line whose name is written with escapes
        lines.append(f"{mark}{digest}  {escaped}\n")
    return "".join(lines)


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


def dataset_manifest(prefix: str | Path, digests: Mapping[str, str]) -> str:
    """Return the text of `PREFIX.sha256` from digests by extension."""
    return manifest_text({f"{Path(prefix).name}.{extension}": digests[extension] for extension in sorted(digests)})


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

"""The checksum manifest of a dataset, `PREFIX.sha256`, in the format of `sha256sum`: it proves a copy.

In: digests by file name, or a dataset's prefix. Out: the text, or the digests read from it, checked line by line.
`sha256sum -c NAME.sha256`, run in the dataset's folder, reads the same file. Not here: what else `--verify` proves
(inspection.py), who publishes the file together with a new dataset (writer.py).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from ctxlm_ds.atomic import write_text
from ctxlm_ds.errors import DataError

MANIFEST_EXTENSION = "sha256"
_MAX_MANIFEST_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_UNESCAPES = {escaped: character for character, escaped in _ESCAPES.items()}


def manifest_path(prefix: str | Path) -> Path:
    """`PREFIX.sha256`."""
    return Path(f"{prefix}.{MANIFEST_EXTENSION}")


def manifest_text(digests: Mapping[str, str]) -> str:
    """The manifest of files given as name (without folder) -> sha256 in hex, a line each in the order given."""
    lines = []
    for name, digest in digests.items():
        escaped = "".join(_ESCAPES.get(character, character) for character in name)
        mark = "\\" if escaped != name else ""  # sha256sum marks a line whose name is written with escapes
        lines.append(f"{mark}{digest}  {escaped}\n")
    return "".join(lines)


def parse_manifest(text: str, where: str | Path) -> dict[str, str]:
    """The digests of `manifest_text`'s output by name. Raises DataError, naming `where`, for any other text."""
    digests: dict[str, str] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise DataError(
                f"{where}: line {number} is not `CHECKSUM  NAME` as sha256sum writes it; the file is damaged, copy it "
                "again, or make it anew with tools/inspect_dataset.py --write-manifest"
            )
        mark, digest, name = match.groups()
        if mark:
            name = re.sub(r"\\[\\nr]", lambda escape: _UNESCAPES[escape.group()], name)
        if digests.setdefault(name, digest.lower()) != digest.lower():
            raise DataError(f"{where}: has two checksums for {name}; the file is damaged, copy it again")
    return digests


def read_manifest(prefix: str | Path) -> dict[str, str] | None:
    """The digests that `PREFIX.sha256` holds, by extension; None where there is no such file.

    The names in it may be those that the files had before all of them were renamed. Raises DataError where it is
    damaged or does not list the files of one dataset.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    if path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise DataError(f"{path}: {path.stat().st_size} bytes are no manifest of a dataset; move it away or restore it")
    try:
        digests = parse_manifest(path.read_bytes().decode("utf-8"), path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 ({error.reason}); the file is damaged, copy it again") from error
    by_extension = {name.rpartition(".")[2]: digest for name, digest in digests.items()}
    stems = {name.rpartition(".")[0] for name in digests}
    if len(stems) != 1 or not {"bin", "idx"} <= by_extension.keys() <= {"bin", "idx", "json"}:
        shown = ", ".join(list(digests)[:4])
        raise DataError(
            f"{path}: lists {shown[:200]}, not a dataset's .bin, .idx and .json; remove it and make it anew with "
            "tools/inspect_dataset.py --write-manifest"
        )
    return by_extension


def check_digest(
    path: Path, digest: str, recorded: str, where: str | Path, remedy: str = "copy it or make it again"
) -> None:
    """Raises DataError where a file's sha256 is not the one that `where` records."""
    if digest != recorded:
        raise DataError(
            f"{path}: sha256 {digest[:16]}, {where} records {recorded[:16]}: the file was changed after it was made; "
            f"{remedy}"
        )


def dataset_manifest(prefix: str | Path, digests: Mapping[str, str]) -> str:
    """The text of `PREFIX.sha256` from digests by extension."""
    return manifest_text({f"{Path(prefix).name}.{extension}": digests[extension] for extension in sorted(digests)})


def write_manifest(prefix: str | Path, digests: Mapping[str, str]) -> Path:
    """Write `PREFIX.sha256` atomically from digests by extension; its path. Raises DataError where it exists."""
    path = manifest_path(prefix)
    if path.exists():
        raise DataError(f"{path}: exists already; remove it if the files were changed on purpose")
    write_text(path, dataset_manifest(prefix, digests))
    return path


def file_digest(path: Path) -> str:
    """sha256 (hex) of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()

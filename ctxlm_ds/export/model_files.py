"""Names of the weight files in a local Hugging Face folder, and their fingerprint. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ctxlm_ds.errors import ExportError
from ctxlm_ds.untrusted_json import open_regular, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAME_BYTES = 255
"""Longest name of a file."""


def model_files(folder: Path) -> list[Path]:
    """Return the files of a local Hugging Face folder: model.safetensors or its shards.

    Raises:
        ExportError: the folder holds no complete safetensors files.
    """
    index = folder / INDEX_FILE
    if not index.exists() and not (folder / SINGLE_FILE).exists():
        raise ExportError(_no_safetensors(folder))
    paths = [folder / name for name in (_indexed_files(index) if index.exists() else [SINGLE_FILE])]
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise ExportError(f"{missing[0]} is missing although {index.name} lists it: copy the folder again")
    return paths


def fingerprint(folder: Path) -> str:
    """Return sha256 (hex) of config.json and the weight files.

    Raises:
        ExportError: a file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    for path in (folder / "config.json", *model_files(folder)):
        try:
            with open_regular(path) as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ExportError(f"{path}: cannot be read ({error.strerror or error}); copy it again") from error
    return digest.hexdigest()


def _indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index lists, all of which must be in its folder."""
    weight_map = read_json_object(index, ExportError).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ExportError(f"{index} is not an index of safetensors files (no weight_map of file names): copy it again")
    for name in names:
        if Path(name).name != name or "\0" in name or name == ".." or len(name.encode(errors="replace")) > NAME_BYTES:
            raise ExportError(f"{index}: the file {name!r:.80} is not in the model's folder; give a folder you trust")
    return sorted(set(names))


def _no_safetensors(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"{folder} holds its weights as a pickle ({pickled[0]}), which can run any code when it is read; if you "
            "trust its source, load it once with transformers' from_pretrained and save it with save_pretrained, which "
            "writes model.safetensors, then give that folder"
        )
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: give a folder written by save_pretrained"

"""exported_from.json: what a Hugging Face folder was made of, so that a finished export is recognised.

In: the arguments of to_hf. Out: True, False, or an ExportError that names what differs. Loads no weights.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import is_same, read_object
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, find_verified, list_checkpoints
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME
from ctxlm_ds.errors import ExportError

EXPORT_RECORD = "exported_from.json"
REMEDY = "replace it with --overwrite, or give another --output"


def export_record(checkpoint: Path, dtype: str, max_shard_bytes: int) -> dict[str, Any]:
    """Return what an export of a checkpoint's folder is made of; `manifest` is None if there is no manifest."""
    manifest = checkpoint / MANIFEST_NAME
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None
    return {"checkpoint": checkpoint.name, "manifest": digest, "dtype": dtype, "max_shard_bytes": max_shard_bytes}


def is_exported(checkpoint: Path, output: Path, dtype: str, max_shard_bytes: int) -> bool:
    """Return whether `output` is the finished export of a checkpoint, or of the newest one of a run.

    Raises:
        CheckpointError: there is no checkpoint, or none that is intact.
        ExportError: the folder was made of something else; the message names the differences.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    recorded = read_object(output / EXPORT_RECORD)
    newest = max(list_checkpoints(checkpoint / CHECKPOINTS_DIR).items(), default=(0, checkpoint))[1]
    if recorded is not None and recorded == export_record(newest, dtype, max_shard_bytes):
        return True
    intact = find_verified(checkpoint)[0]
    return is_same(output, recorded, export_record(intact, dtype, max_shard_bytes), REMEDY, ExportError)

"""Whether an export is there already: what a Hugging Face folder was made of, kept in exported_from.json in it.

In: the arguments of to_hf. Out: yes, no, or an ExportError that names what differs. Loads no weights.
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
    """Return what an export of one checkpoint's folder is made of; None stands for a manifest that is not there."""
    manifest = checkpoint / MANIFEST_NAME
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None
    return {"checkpoint": checkpoint.name, "manifest": digest, "dtype": dtype, "max_shard_bytes": max_shard_bytes}


def is_exported(checkpoint: Path, output: Path, dtype: str, max_shard_bytes: int) -> bool:
    """Tell whether `output` is the finished export of a checkpoint, or of the newest one of a run.

    Raises:
        CheckpointError: there is no checkpoint, or none that is intact.
        ExportError: the folder was made otherwise; the message names the differences.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    recorded = read_object(output / EXPORT_RECORD)
    newest = max(list_checkpoints(checkpoint / CHECKPOINTS_DIR).items(), default=(0, checkpoint))[1]
    if recorded is not None and recorded == export_record(newest, dtype, max_shard_bytes):
        return True
    intact = find_verified(checkpoint)[0]
    return is_same(output, recorded, export_record(intact, dtype, max_shard_bytes), REMEDY, ExportError)

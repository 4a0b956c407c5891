"""Joining datasets beside copying them: `merge_datasets`, which hashes each part and the whole, and a flushed copy."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ctxlm_ds.atomic import fsync_path
from ctxlm_ds.benchmark.timing import Comparison, in_turn
from ctxlm_ds.data.dataset.merge import merge_datasets
from ctxlm_ds.data.dataset.reader import dataset_file


def compare_merge(prefixes: Sequence[str], output_dir: str, rounds: int) -> Comparison:
    """Bytes of .bin and .idx a second of both, on the disk of `output_dir`.

    Raises:
        DataError: as `merge_datasets`.
    """
    files = [dataset_file(prefix, extension) for prefix in prefixes for extension in ("bin", "idx")]
    num_bytes = sum(path.stat().st_size for path in files)
    logging.getLogger("ctxlm_ds").setLevel(logging.WARNING)

    def ours() -> int:
        with tempfile.TemporaryDirectory(dir=output_dir) as folder:
            merge_datasets(prefixes, Path(folder) / "joined")
        return num_bytes

    def theirs() -> int:
        with tempfile.TemporaryDirectory(dir=output_dir) as folder:
            for number, path in enumerate(files):
                fsync_path(Path(shutil.copyfile(path, Path(folder) / str(number))))
        return num_bytes

    return in_turn(ours, theirs, rounds, "bytes/s", "copy")

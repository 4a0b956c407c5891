"""What every tool that makes a checkpoint of another one shares: find and verify the source, refuse to replace
anything, ask for room, finish the result.

In: a run or a checkpoint, and the folder to make. Out: a run folder that resumes, exports and verifies like any other.
Not here: what is in it (reshape.py, universal.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ctxlm_ds.atomic import fsync_tree, output_folder
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, LATEST_NAME, find_newest_intact, step_name
from ctxlm_ds.checkpoint.layout_free import CheckpointReader
from ctxlm_ds.checkpoint.manifest import Manifest, hash_files, list_files, read_manifest, verify, write_manifest
from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.recipe.schema import RunConfig

METRICS_NAME = "metrics.jsonl"
WORD_EMBEDDINGS = "word_embeddings.weight"
SPACE_SLACK_BYTES = 16 * 2**20


def find_verified(path: Path, check: Callable[[Path], Manifest] = verify) -> tuple[Path, Manifest]:
    """Find a checkpoint's folder, or the newest one of a run, that `check` has compared with its manifest.

    Raises:
        CheckpointError: there is none, or none that is intact.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a run or a checkpoint (RUN/checkpoints/step-…)")
    if not (path / CHECKPOINTS_DIR).is_dir():
        return path, check(path)
    newest = find_newest_intact(path / CHECKPOINTS_DIR, check).newest
    if newest is None:
        raise CheckpointError(f"{path / CHECKPOINTS_DIR} holds no checkpoint yet; wait for the run's first one")
    return newest, read_manifest(newest)


def saved_config(folder: Path, reader: CheckpointReader) -> RunConfig:
    """The recipe in a checkpoint, its vocabulary as large as the table that was saved."""
    config = load_saved_config(folder / "config.yaml")
    if WORD_EMBEDDINGS not in reader:
        raise CheckpointError(f"{folder} has no {WORD_EMBEDDINGS}, so it is not a model of this project")
    model = config.model.model_copy(update={"vocab_size": reader.shape(WORD_EMBEDDINGS)[0]})
    return config.model_copy(update={"model": model})


def check_new(output: Path, source: Path) -> None:
    """Raise CheckpointError where `output` is taken, or lies in the source or around it."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is never overwritten; give another --output")
    target, origin = output.resolve(), source.resolve()
    if target.is_relative_to(origin) or origin.is_relative_to(target):
        raise CheckpointError(f"{output} and the source {source} lie in each other; give another --output")


def require_space(output: Path, needed_bytes: int) -> None:
    """Raise CheckpointError where the disk of `output` has less room than will be written."""
    place = output.resolve()
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes + SPACE_SLACK_BYTES:
        raise CheckpointError(
            f"{output} needs {needed_bytes / 1e9:.2f} GB and {place} has {free_bytes / 1e9:.2f} GB left; free space "
            "there or give another --output"
        )


def total_elements(reader: CheckpointReader) -> int:
    """Elements of all weights and moments."""
    return sum(reader.num_elements(name) * len(reader.kinds(name)) for name in reader.names())


@contextmanager
def new_run(output: Path, step: int) -> Iterator[Path]:
    """Fill a run's only checkpoint of a step; the run appears when it is complete, with manifest and `latest`.

    Yields the checkpoint's folder.
    """
    with output_folder(output) as run:
        folder = run / CHECKPOINTS_DIR / step_name(step)
        folder.mkdir(parents=True)
        yield folder
        # What the manifest lists must be on the disk before it.
        fsync_tree(folder)
        write_manifest(folder, step, hash_files(folder, list_files(folder)))
        (run / CHECKPOINTS_DIR / LATEST_NAME).write_text(folder.name + "\n", encoding="utf-8")
    logger.info("wrote %s", output / CHECKPOINTS_DIR / folder.name)


def copy_run_files(source: Path, manifest: Manifest, folder: Path, rewritten: set[str]) -> None:
    """Copy what a checkpoint holds besides its tensors (state, tokenizer), and its run's metrics up to now."""
    for name in manifest.files:
        if name in rewritten or name.endswith(".safetensors"):
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target)
    metrics = source.parent.parent / METRICS_NAME
    if source.parent.name == CHECKPOINTS_DIR and metrics.is_file():
        shutil.copyfile(metrics, folder.parent.parent / METRICS_NAME)

"""A checkpoint written anew for another layout, ahead of time: each future rank's pieces in files of its own.

Any layout reads any checkpoint, but hundreds of ranks that each pick pieces out of hundreds of files start slowly.
In: a run or a checkpoint, a layout. Out: a run folder with the same numbers. Needs no launcher and no deepspeed; one
piece is in memory at a time. Not here: which rank holds what (target_layout.py), DeepSpeed's own format (universal.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctxlm_ds.checkpoint.checkpoint_copy import (
    check_new,
    copy_run_files,
    find_verified,
    new_run,
    require_space,
    saved_config,
    total_elements,
)
from ctxlm_ds.checkpoint.layout_free import INDEX_NAME, CheckpointReader, ParameterPieces, PieceWriter, merge_index
from ctxlm_ds.checkpoint.target_layout import Layout, PlannedPiece, plan_pieces, with_layout
from ctxlm_ds.checkpoint.tensor_file import FP32_BYTES
from ctxlm_ds.console import ByteProgress, byte_progress, logger
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.load import dump_config, load_saved_config

__all__ = ["Layout", "Reshaped", "reshape"]

CONFIG_NAME = "config.yaml"
STATE_NAME = "state.json"
HEADER_BYTES_PER_PIECE = 160
"""Room for a piece in a file's header, besides its name."""


@dataclass(frozen=True)
class Reshaped:
    """What was read and written."""

    source: Path
    output: Path
    """The new run's folder."""
    step: int
    layout: Layout
    num_elements: int
    """Weights and moments."""

    def describe(self) -> list[str]:
        """Lines for a person."""
        return [
            f"{self.source}, step {self.step}: {self.num_elements:,} weights and moments",
            f"wrote {self.output} for {self.layout}: {self.layout.world_size} ranks",
            f"next: --set run_dir={self.output} parallel.tensor_parallel_size={self.layout.tensor_parallel_size} "
            f"parallel.pipeline_parallel_size={self.layout.pipeline_parallel_size}",
        ]


def reshape(checkpoint: Path, output: Path, layout: Layout) -> Reshaped:
    """Write a checkpoint for another layout, as the only one of a new run folder.

    Args:
        checkpoint: a run (its newest intact checkpoint) or one checkpoint.
        output: folder to make; it appears when it is complete.
        layout: whose ranks are to have files of their own.

    Raises:
        CheckpointError: no checkpoint, a damaged one, imported weights, no room, or `output` is taken.
        ConfigError: the model does not run in this layout.
    """
    check_new(output, checkpoint)
    source, manifest = find_verified(checkpoint)
    if STATE_NAME not in manifest.files:
        raise CheckpointError(
            f"{source} holds imported weights and no run to go on with, so there is nothing to reshape; start one with "
            f"--set initialize_from={source}"
        )
    reader = CheckpointReader(source)
    config = with_layout(saved_config(source, reader), layout)
    elements = total_elements(reader)
    shapes = {name: reader.shape(name) for name in reader.names()}
    plan = list(plan_pieces(config, shapes, layout))
    room_bytes = sum(2 * _header_room(pieces, len(reader.moment_kinds())) for _, pieces in plan)
    require_space(output, elements * FP32_BYTES + room_bytes + (source / INDEX_NAME).stat().st_size)
    logger.info("reshaping %s to %s: %d ranks", source, layout, layout.world_size)
    with new_run(output, manifest.step) as folder:
        with byte_progress("reshape", elements * FP32_BYTES) as progress:
            written = _Written(progress)
            parts = [written.write_rank(reader, folder, rank, pieces) for rank, pieces in plan]
        reader.close()
        merge_index(folder, parts, reader.scalars())
        # The recipe itself, not what was derived from it: a resume compares its sections.
        recipe = load_saved_config(source / CONFIG_NAME).model_copy(update={"parallel": config.parallel})
        (folder / CONFIG_NAME).write_text(dump_config(recipe), encoding="utf-8")
        copy_run_files(source, manifest, folder, {CONFIG_NAME, INDEX_NAME})
    return Reshaped(source, output, manifest.step, layout, elements)


def _header_room(pieces: Sequence[PlannedPiece], num_kinds: int) -> int:
    """Bytes for the header of a rank's larger file, so that it need not be moved."""
    return 256 + max(1, num_kinds) * sum(HEADER_BYTES_PER_PIECE + len(piece.name) for piece in pieces)


class _Written:
    """Writes ranks one after the other and reports the bytes of all."""

    def __init__(self, progress: ByteProgress) -> None:
        self._progress = progress
        self._done_bytes = 0

    def write_rank(
        self, reader: CheckpointReader, folder: Path, rank: int, pieces: Sequence[PlannedPiece]
    ) -> ParameterPieces:
        writer = PieceWriter(folder, rank, _header_room(pieces, len(reader.moment_kinds())))
        for name, shard, start, length in pieces:
            for kind in reader.kinds(name):
                values = reader.read(name, kind, start, length, shard)
                writer.add(name, kind, shard.shape, start, values, shard)
                self._done_bytes += length * FP32_BYTES
                self._progress.update(self._done_bytes, f"rank {rank}")
        return writer.close()

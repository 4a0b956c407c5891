"""Compute a teacher's outputs for the rows of a distillation run ahead, for `teacher.outputs` of the recipe.

Runs on one process, or with torchrun or deepspeed on several, each of which writes every n-th file with a complete
copy of the teacher. The same command continues after an interruption, checks finished files, writes damaged ones again,
and adds rows for a larger --steps.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.atomic import stop_signals_interrupt
from ctxlm_ds.console import at_least, counted, format_duration, format_size, setup_logging
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.export.stored_outputs import (
    MANIFEST_NAME,
    SHARD_BYTES,
    TRAIN,
    Outputs,
    changed_parts,
    changed_settings,
    deciding_parts,
    deciding_settings,
    read_manifest,
    with_tokenizer,
    write_manifest,
)
from ctxlm_ds.process.launch import discover_ranks
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig
from ctxlm_ds.recipe.teacher_rules import needs_teacher

if TYPE_CHECKING:
    import torch

    from ctxlm_ds.checkpoint.manifest import FileEntry
    from ctxlm_ds.data.sample import Batch
    from ctxlm_ds.data.stream.run_datasets import RunRows
    from ctxlm_ds.objectives.base import Objective
    from ctxlm_ds.parallel.topology import Topology

logger = logging.getLogger("ctxlm_ds")
PROGRESS_S = 30.0
SPARE_BYTES = 1 << 26
"""Left free on the disk."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, metavar="RECIPE", help="a path, or the name of a shipped recipe")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change settings")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to write, or to continue")
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="steps of the run (default: training.max_steps)")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    ranks = discover_ranks()
    setup_logging(ranks.rank)
    config = load_config(args.config, args.set)
    if not needs_teacher(config.objective):
        raise ConfigError(f"objective.name: {config.objective.name} compares with no teacher, so nothing is computed")
    teacher = config.teacher.model_copy(update={"outputs": None})
    config = config.model_copy(update={"teacher": teacher, "parallel": ParallelConfig()})

    from ctxlm_ds.pretrain import join_ranks
    from ctxlm_ds.training.engine.runtime import leave_waiting_to_watchdog

    topology = join_ranks(config, {}, ranks)
    leave_waiting_to_watchdog()
    with stop_signals_interrupt():
        write_outputs(config, args.output, args.steps or config.training.max_steps, topology)

    from torch import distributed

    distributed.destroy_process_group()


def write_outputs(config: RunConfig, folder: Path, steps: int, topology: Topology) -> None:
    """Write what a folder lacks of the outputs for `steps` steps and the held-out rows; all ranks call it."""
    from ctxlm_ds.objectives.build import build_objective
    from ctxlm_ds.run import agreed_teacher, resolve
    from ctxlm_ds.run_data import build_rows_by_node

    config, tokenizer = topology.run_on_rank_0_first(partial(resolve, config))
    config = agreed_teacher(config, tokenizer, topology)
    objective = build_objective(config.objective, tokenizer)
    rows = build_rows_by_node(config.row_settings, tokenizer, objective, topology)
    teacher = topology.run_together(lambda: TeacherPass(config, objective, rows))
    parts = deciding_parts(config, rows, config.training.rows_after(steps))
    micro_batch_size = config.training.micro_batch_size
    shapes, code = teacher.describe()
    wanted = Outputs(with_tokenizer(deciding_settings(config), tokenizer), code, shapes, 1, parts, None)
    shard_rows = max(1, SHARD_BYTES // (wanted.row_bytes * micro_batch_size)) * micro_batch_size
    wanted = replace(wanted, shard_rows=shard_rows)
    outputs = topology.compute_on_rank_0(lambda: begin(folder, wanted))
    files = topology.run_together(lambda: write_files(folder, outputs, teacher, topology))
    gathered = {name: entry for found in topology.all_gather_object(files) for name, entry in found.items()}
    topology.run_on_rank_0(lambda: write_manifest(folder, replace(outputs, files=dict(sorted(gathered.items())))))
    logger.info("complete: set teacher.outputs=%s", folder)


def begin(folder: Path, wanted: Outputs) -> Outputs:
    """Return what to write, after comparing it with what the folder holds and with the free disk space.

    Raises:
        ConfigError: the folder holds something else, or the disk is too small.
    """
    found = read_manifest(folder)
    if found is None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--output {folder} is not empty and has no {MANIFEST_NAME}; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        found = replace(wanted, parts=[])
    changes = changed_settings(found, wanted.settings)
    rows = {part.name: part.rows for part in found.parts}
    again = [replace(part, rows=min(part.rows, rows[part.name])) for part in wanted.parts if part.name in rows]
    changes = changes or changed_parts(found, again)
    changes += [f"{name} -> {now}" for name, now in wanted.tensors.items() if found.tensors.get(name) != now]
    if changes:
        raise ConfigError(
            f"--output {folder} holds the outputs of another run: {', '.join(changes)}; choose another folder"
        )
    parts = {part.name: part for part in found.parts}
    parts |= {part.name: part for part in wanted.parts if part.rows > rows.get(part.name, 0)}
    outputs = replace(found, parts=list(parts.values()))
    check_space(folder, outputs)
    write_manifest(folder, replace(outputs, files=None))
    return outputs


def check_space(folder: Path, outputs: Outputs) -> None:
    """Log the size, and raise ConfigError if what is missing does not fit on the disk."""
    shards = outputs.shards()
    there = sum((folder / name).stat().st_size for name, *_ in shards if (folder / name).is_file())
    total, free = outputs.row_bytes * sum(part.rows for part in outputs.parts), shutil.disk_usage(folder).free
    rows = ", ".join(f"{part.name} {part.rows:,}" for part in outputs.parts)
    missing = max(0, total - there)
    logger.info(
        "rows: %s; %s per row, %s in %s; %s to write, %s free",
        rows, format_size(outputs.row_bytes), format_size(total), counted(len(shards), "file"), format_size(missing),
        format_size(free),
    )  # fmt: skip
    if missing + SPARE_BYTES > free:
        raise ConfigError(
            f"--output {folder}: {format_size(missing)} are needed and {format_size(free)} are free; choose another "
            "disk, or fewer --steps"
        )


def write_files(folder: Path, outputs: Outputs, teacher: TeacherPass, topology: Topology) -> dict[str, FileEntry]:
    """Write this rank's files unless they are there; return the entries of all of this rank's files."""
    from ctxlm_ds.export.stored_rows import finished_entry, write_shard

    own = outputs.shards()[topology.rank :: topology.world_size]
    entries: dict[str, FileEntry] = {}
    started_s = logged_s = time.monotonic()
    computed = 0
    for number, (name, part, first, stop) in enumerate(own, start=1):
        entry = finished_entry(folder / name, outputs, stop - first)
        if entry is None:
            tensors = teacher.outputs(outputs.parts[part].name, first, stop)
            try:
                entry = write_shard(folder / name, tensors, outputs.dtype)
            except OSError as error:
                raise DataError(f"{folder / name} cannot be written: {error.strerror or error}") from error
            computed += stop - first
        entries[name] = entry
        now_s = time.monotonic()
        if now_s - logged_s > PROGRESS_S and computed:
            logged_s, pace = now_s, computed / (now_s - started_s)
            left_s = sum(end - start for _, _, start, end in own[number:]) / pace
            logger.info("file %d of %d, %.0f rows/s, %s left", number, len(own), pace, format_duration(left_s))
    return entries


class TeacherPass:
    """The teacher without the products that are not stored, and the rows of a run."""

    def __init__(self, config: RunConfig, objective: Objective, rows: RunRows) -> None:
        """Build the teacher and read its weights. Raises ConfigError for impossible ones."""
        import torch

        from ctxlm_ds.export.teacher import teacher_values
        from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
        from ctxlm_ds.models.build import ModelBuild, build_teacher_layers
        from ctxlm_ds.models.layers import LayerSequence
        from ctxlm_ds.models.parts.distillation import needed_layers
        from ctxlm_ds.models.parts.stored_teacher import split_at_products
        from ctxlm_ds.training.engine.runtime import device_type

        def kernels_of(precision: str) -> KernelSet:
            return KernelSet(config.kernels, device_type(), DTYPES[precision])

        training = config.training
        build = ModelBuild(
            (), kernels_of(training.precision), compile=training.compile, shares_rows=config.data.shares_rows
        )
        layers, outputs = build_teacher_layers(
            config, build, objective.teacher_outputs, kernels_of, objective.comparisons
        )
        names, _ = split_at_products(layers, outputs)
        model = LayerSequence(needed_layers(layers, names), names)
        values = teacher_values(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values(name))
        precision = training.precision if config.teacher.precision == "run" else config.teacher.precision
        self._model = model.to(device_type(), DTYPES[precision]).eval().requires_grad_(False)
        self._device, self._config, self._objective, self._rows = device_type(), config, objective, rows

    def describe(self) -> tuple[dict[str, list[int]], str]:
        """Return the shape of a row of each tensor, and their data type as safetensors names it."""
        from ctxlm_ds.export.stored_rows import TORCH_DTYPES

        found = self._run(next(self._batches(TRAIN, 0, 1)))
        dtypes = {value.dtype for value in found.values()}
        (code,) = (code for code, dtype in TORCH_DTYPES.items() if dtypes == {dtype})
        return {name: list(value.shape[1:]) for name, value in found.items()}, code

    def outputs(self, part: str, first: int, stop: int) -> dict[str, torch.Tensor]:
        """Compute the tensors of rows `first` to `stop` of a part, on the CPU."""
        import torch

        held: dict[str, torch.Tensor] = {}
        place, running = 0, None

        def keep(found: dict[str, torch.Tensor], place: int) -> None:
            for name, value in found.items():
                if name not in held:
                    held[name] = torch.empty((stop - first, *value.shape[1:]), dtype=value.dtype)
                held[name][place : place + len(value)] = value[: stop - first - place]

        # An accelerator computes a micro-batch while the rows of the next are read.
        for batch in self._batches(part, first, stop):
            found = self._run(batch)
            if running is not None:
                keep(running, place)
                place += self._config.training.micro_batch_size
            running = found
        assert running is not None
        keep(running, place)
        return held

    def _run(self, batch: Batch) -> dict[str, torch.Tensor]:
        import torch

        with torch.no_grad():
            return self._model.run({name: batch.fields[name].to(self._device) for name in self._model.inputs})

    def _batches(self, part: str, first: int, stop: int) -> Iterator[Batch]:
        """Yield complete micro-batches of a part's rows from `first`; the last may have rows after `stop`."""
        import numpy as np

        from ctxlm_ds.data.index.record import HELD_OUT_SEED
        from ctxlm_ds.data.stream.blend import RowOrder, RowStream, train_stream
        from ctxlm_ds.data.stream.collate import to_batches
        from ctxlm_ds.data.stream.loader import HELD_OUT_MASKS, TRAIN_MASKS, BatchBuilder

        config, objective, name = self._config, self._objective, part.removeprefix("eval/")
        if part == TRAIN:
            source, seed, purpose = self._rows.train, config.training.seed, TRAIN_MASKS
            order: RowStream = train_stream(source, config.data, config.training)
        else:
            if name not in self._rows.validation:
                raise ConfigError(f"data.validation has no {name}, whose outputs are not complete; name it as before")
            source, seed, purpose = self._rows.validation[name], HELD_OUT_SEED, HELD_OUT_MASKS
            order = RowOrder(len(source), HELD_OUT_SEED)
            if config.evaluation.mask_prob is not None:
                objective = objective.for_evaluation(config.evaluation.mask_prob)
        builder = BatchBuilder(source, objective, config.data, seed, purpose)
        size = config.training.micro_batch_size
        for start in range(first, stop, size):
            positions = np.arange(start, start + size, dtype=np.int64)
            planned = order.at(positions if part == TRAIN else positions % len(source))
            yield from to_batches(builder(planned), builder.fields, size)

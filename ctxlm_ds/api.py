"""Python interface for notebooks and scripts, imported with `from ctxlm_ds import ...` (docs/python.md)."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ctxlm_ds.errors import EXIT_UNEXPECTED, CheckpointError, ConfigError
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.deepspeed import DEFAULT_CONFIG, build_deepspeed_config
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.schema import RunConfig

if TYPE_CHECKING:
    from ctxlm_ds.data.sample import Batch
    from ctxlm_ds.export.huggingface import Conversion
    from ctxlm_ds.models.layers import LayerSequence
    from ctxlm_ds.training.hooks.hooks import StepMetrics


def iterate_batches(config: RunConfig, start_row: int = 0) -> Iterator[Batch]:
    """Yield the micro-batches that one rank would train on, from row `start_row` of the stream, indefinitely.

    Builds missing sample indexes. Needs no accelerator and no process group.

    Raises:
        ConfigError, DataError, TokenizerError: the recipe names no usable data or tokenizer.
    """
    from ctxlm_ds.data.stream.loader import TrainLoader
    from ctxlm_ds.data.stream.run_datasets import build_run_rows
    from ctxlm_ds.objectives.base import build_objective
    from ctxlm_ds.tokenizers.load import open_tokenizer

    check_config(config, None)
    tokenizer, _ = open_tokenizer(config.tokenizer.path, config.model.vocab_size)
    objective = build_objective(config.objective, tokenizer)
    rows = build_run_rows(config.row_settings, tokenizer, objective).train
    loader = TrainLoader(rows, objective, config.data, config.training, start_row=start_row)
    try:
        for step in loader:
            yield from step.micro_batches
    finally:
        loader.close()


def build_model(config: RunConfig, device: str = "cpu") -> LayerSequence:
    """Build the complete model with its initial values, in evaluation mode and the precision of the recipe.

    `model.run(batch.fields)` returns the tensors that the objective needs, by name.

    Raises:
        ConfigError: the shape is impossible, or neither model.vocab_size nor tokenizer.path is set.
        KernelError: a kernel that the recipe asks for by name does not run on the device.
    """
    from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
    from ctxlm_ds.models.layers import ModelBuild
    from ctxlm_ds.models.program import build_program
    from ctxlm_ds.registry import OBJECTIVES
    from ctxlm_ds.tokenizers.load import open_tokenizer

    model = config.model
    if model.vocab_size is None:
        _, size = open_tokenizer(config.tokenizer.path, None)
        model = model.model_copy(update={"vocab_size": size})
    dtype = DTYPES[config.training.precision]
    outputs = OBJECTIVES.get(config.objective.name).outputs
    kernels = KernelSet(dict(config.kernels), device, dtype)
    model_build = ModelBuild(outputs, kernels, shares_rows=config.data.shares_rows)
    return build_program(model, model_build).module(config.training.seed).to(device, dtype).eval()


def export_model(checkpoint: str | Path, output: str | Path, dtype: str = "fp32") -> Conversion:
    """Write a run or a checkpoint as a folder for transformers, and compare its logits.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        ExportError: no plain class of transformers computes this model, or the logits differ.
    """
    from ctxlm_ds.export.huggingface import to_hf

    return to_hf(Path(checkpoint), Path(output), dtype)


class Run:
    """A run in this process, on one rank or under a launcher: `with Run(config) as run: ...`.

    Folder, lock, metrics, checkpoints and resume are those of `python -m ctxlm_ds.pretrain`. The caller takes the steps
    and decides when to evaluate and save. There is no watchdog. A process has one run at a time.
    """

    def __init__(self, config: RunConfig, deepspeed_config: str | Path | Mapping[str, Any] | None = None) -> None:
        """Check the recipe; `with` starts the run.

        `deepspeed_config` is DeepSpeed's settings, a path of its JSON, or a name in ds_configs/; None takes the
        recipe's.

        Raises:
            ConfigError: the recipe does not fit the number of ranks, or the DeepSpeed settings do not fit the recipe.
        """
        from ctxlm_ds.process.launch import discover_ranks

        if config.phases:
            raise ConfigError("phases: Run trains one phase; take Run(run_phases(config)[0].config)")
        self.config = config
        self._ranks = discover_ranks()
        check_config(config, self._ranks.world_size)
        source = deepspeed_config or config.deepspeed or DEFAULT_CONFIG
        given = dict(source) if isinstance(source, Mapping) else load_deepspeed_json(source)
        self._deepspeed = build_deepspeed_config(config, given, self._ranks.world_size)

    def __enter__(self) -> Run:
        from ctxlm_ds.pretrain import check_judged_tasks, join_ranks, judge_checkpoints
        from ctxlm_ds.process.run_lock import RunLock, make_run_dir
        from ctxlm_ds.process.signals import StopSignal

        self.run_dir = make_run_dir(self.config.directory)
        topology = join_ranks(self.config.parallel, self.config.training, self._deepspeed, self._ranks)
        # Keep the process group for the next run: DeepSpeed keeps groups derived from it.
        atexit.register(_leave_ranks)
        from ctxlm_ds.run import build_run

        self._lock = RunLock(self.run_dir, on_loss=lambda: os._exit(EXIT_UNEXPECTED))
        try:
            topology.run_on_rank_0(self._lock.acquire)
            check_judged_tasks(self.config.evaluation.downstream, self.config.model.family, topology)
            self._trainer = build_run(self.config, self._deepspeed, self._lock, topology, StopSignal())
            judge_checkpoints(self._trainer, self.run_dir)
            self._trainer.begin()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with closing(self._trainer):
                self._trainer.end("left by its caller", error)
        finally:
            self._lock.release()

    @property
    def step(self) -> int:
        """Number of optimizer steps done, including those before a resume."""
        return self._trainer.state.step

    def steps(self, count: int | None = None) -> Iterator[StepMetrics]:
        """Take `count` optimizer steps (None: up to a limit of the recipe) and yield the metrics of each.

        Raises:
            TrainingError: the loss is not finite (anomalies.non_finite).
        """
        last = self.step + (count or 0)
        while self._trainer.stop_reason() is None if count is None else self.step < last:
            metrics = self._trainer.step()
            if metrics is not None:
                self._trainer.hooks.call("on_step_end", metrics)
                yield metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluate the held-out sources and return their metrics as `eval/SOURCE/METRIC`."""
        return self._trainer.evaluate()

    def evaluate_by_batch(self) -> dict[str, list[dict[str, float]]]:
        """Evaluate the held-out sources and return the metrics of each micro-batch, `loss` and `TERM_loss`, by source.

        Rows and masks of a micro-batch are the same at every step and for every training.seed.
        """
        evaluate, sources = self._trainer.engine.evaluate, self._trainer.validation
        return {name: [evaluate([batch]) for batch in batches] for name, batches in sources.items()}

    def save(self) -> Path:
        """Write a checkpoint of the current state and return its folder.

        Raises:
            CheckpointError: it could not be written; older checkpoints are untouched.
        """
        self._trainer.saves.last(self._trainer.state)
        folder = self._trainer.saves.saver.last_good()
        if folder is None:
            raise CheckpointError(f"no checkpoint was written to {self.run_dir}")
        return Path(folder)


def _leave_ranks() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()

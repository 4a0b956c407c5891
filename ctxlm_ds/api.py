"""The Python interface: what a notebook or a script of one's own does with the parts of ctxlm_ds.

`from ctxlm_ds import ...` gives these names. docs/python.md has an example, which a test runs. Everything works under
a launcher too, on several ranks; without one it is a run of one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.deepspeed import DEFAULT_CONFIG, build_deepspeed_config, load_deepspeed_json
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.sample import Batch
    from ctxlm_ds.export.huggingface import Conversion
    from ctxlm_ds.models.layers import LayerSequence
    from ctxlm_ds.tokenizers.base import Tokenizer
    from ctxlm_ds.training.hooks import StepMetrics


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a recipe, a path or the name of a shipped one, with overrides such as `training.max_steps=100`.

    Raises:
        ConfigError: lists everything that is wrong, each with its place.
    """
    return load_config(recipe, overrides)


def open_tokenizer(folder: str | Path) -> Tokenizer:
    """Open a tokenizer's folder.

    Raises:
        TokenizerError: the folder holds none that can be used.
    """
    from ctxlm_ds.tokenizers.load import load_tokenizer

    return load_tokenizer(folder)


def open_dataset(prefix: str | Path) -> IndexedDataset:
    """Open an indexed dataset by its prefix, without .bin and .idx.

    Raises:
        DataError: a file is missing or damaged.
    """
    from ctxlm_ds.data.dataset.reader import IndexedDataset

    return IndexedDataset(prefix)


def iterate_batches(config: RunConfig, start_row: int = 0) -> Iterator[Batch]:
    """Yield the micro-batches that training reads, from a row of the stream on, without end.

    Sample indexes that are missing are built. Needs no accelerator and no process group.

    Raises:
        ConfigError, DataError, TokenizerError: the recipe names no usable data or tokenizer.
    """
    from ctxlm_ds.data.stream.loader import TrainLoader
    from ctxlm_ds.data.stream.run_datasets import build_run_rows
    from ctxlm_ds.objectives.build import build_objective
    from ctxlm_ds.run_builder import load_run_tokenizer, resolve

    tokenizer = load_run_tokenizer(config)
    config = resolve(config, tokenizer)
    objective = build_objective(config.objective, tokenizer)
    rows = build_run_rows(config, tokenizer, objective).train
    for step in TrainLoader(rows, objective, config, start_row=start_row):
        yield from step.micro_batches


def build_model(config: RunConfig) -> LayerSequence:
    """Build the recipe's model as one torch module with its initial values; `model.run(batch.fields)` computes it.

    Raises:
        ConfigError: the shape is impossible, or neither model.vocab_size nor tokenizer.path is set.
    """
    import torch

    from ctxlm_ds.kernels.dispatch import DTYPES, choose_kernels
    from ctxlm_ds.models.build import ModelBuild
    from ctxlm_ds.models.build import build_model as build
    from ctxlm_ds.registry import OBJECTIVES
    from ctxlm_ds.run_builder import load_run_tokenizer, resolve

    if config.model.vocab_size is None:
        config = resolve(config, load_run_tokenizer(config))
    kernels = choose_kernels(config.kernels, "cpu", torch.float32)
    outputs = OBJECTIVES.get(config.objective.name).outputs
    model = build(
        config.model, ModelBuild(outputs, kernels, shares_rows=config.data.shares_rows), config.training.seed
    )
    return model.to(DTYPES[config.training.precision])


def export(checkpoint: str | Path, output: str | Path, dtype: str = "fp32") -> Conversion:
    """Write a run or a checkpoint as a folder that transformers loads, proved by its logits.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        ExportError: no plain class of transformers computes this model, or the logits differ.
    """
    from ctxlm_ds.export.huggingface import to_hf

    return to_hf(Path(checkpoint), Path(output), dtype)


class Run:
    """A run that is open in this process: `with Run(config) as run: ...`.

    It is the run of `python -m ctxlm_ds.pretrain`, with its folder, lock, checkpoints and resume, but the caller takes
    the steps.
    """

    def __init__(self, config: RunConfig, deepspeed_config: str | Path | Mapping[str, Any] | None = None) -> None:
        """Check the recipe; the run begins with `with`.

        Args:
            config: of load_recipe.
            deepspeed_config: DeepSpeed's settings, or a path or name in ds_configs/ of its JSON; None takes the
                recipe's.

        Raises:
            ConfigError: the recipe does not fit the number of ranks, or the DeepSpeed settings do not fit the recipe.
        """
        from ctxlm_ds.process.launch import discover_ranks

        self.config = config
        self._ranks = discover_ranks()
        check_config(config, self._ranks.world_size)
        source = deepspeed_config or config.deepspeed or DEFAULT_CONFIG
        given = dict(source) if isinstance(source, Mapping) else load_deepspeed_json(source)
        self._deepspeed = build_deepspeed_config(config, given, self._ranks.world_size)
        self.run_dir = Path(config.run_dir or Path("runs") / config.name)

    def __enter__(self) -> Run:
        from ctxlm_ds.errors import EXIT_UNEXPECTED
        from ctxlm_ds.process.launch import StopSignal, prepare_process
        from ctxlm_ds.process.run_lock import RunLock

        prepare_process(self._ranks, self.config.training.deterministic, one_queue=False)
        from ctxlm_ds.parallel.topology import build_topology
        from ctxlm_ds.run_builder import build_run
        from ctxlm_ds.training.runtime import check_precision, init_process_group

        check_precision(self.config)
        init_process_group()
        layout = self.config.parallel
        topology = build_topology(
            self._ranks.local_rank,
            self._ranks.local_world_size,
            layout.tensor_parallel_size,
            layout.pipeline_parallel_size,
        )
        self._lock = RunLock(self.run_dir, on_loss=lambda: os._exit(EXIT_UNEXPECTED))
        try:
            topology.run_on_rank_0(lambda: self._lock.acquire(wait_s=0.0))
            self.trainer = build_run(self.config, self._deepspeed, self._lock, topology, StopSignal())
            self.trainer.begin()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        from torch import distributed

        self._lock.release()
        distributed.destroy_process_group()

    @property
    def step(self) -> int:
        """Optimizer steps done, those before a resume included."""
        return self.trainer.state.step

    def steps(self, count: int) -> Iterator[StepMetrics]:
        """Take `count` optimizer steps and yield the figures of each.

        Raises:
            TrainingError: the loss is not finite (anomalies.non_finite).
        """
        for _ in range(count):
            metrics = self.trainer.step()
            if metrics is not None:
                yield metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluate the held-out sources; return `eval/SOURCE/FIGURE`."""
        return self.trainer.evaluate()

    def save(self) -> Path:
        """Write a checkpoint of this moment and return its folder.

        Raises:
            CheckpointError: it could not be written; older checkpoints are untouched.
        """
        self.trainer.saves.last(self.trainer.state)
        folder = self.trainer.saves.last_good()
        if folder is None:
            raise CheckpointError(f"no checkpoint was written to {self.run_dir}")
        return Path(folder)

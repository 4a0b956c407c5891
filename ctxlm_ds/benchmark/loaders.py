"""Rows of the loader beside transformers' collator, and beside what a GPU takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.benchmark.timing import RatioComparison, in_turn
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.data.stream.run_datasets import train_parts
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.planning.hardware import TERA, find_gpu
from ctxlm_ds.planning.measure import training_flops_per_row
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer

GPU = "H100"
MODEL = "bert-base"


@dataclass(frozen=True, slots=True)
class LoaderComparison:
    """Both sides' rows a second, and what they are for."""

    comparison: RatioComparison
    rows_a_core: float
    """Ours, a second of processor time: what one worker process makes on a core of its own."""
    rows_a_gpu: float
    """What one GPU takes of BERT-base at this length, a second."""
    seq_length: int

    def lines(self) -> list[str]:
        """The table of both sides, then what a core makes and a GPU takes."""
        return [
            *self.comparison.lines(),
            f"{'one-core':<18}{self.rows_a_core:>12,.0f} rows/s of {self.seq_length} positions, by processor time",
            f"{MODEL + '/' + GPU:<18}{self.rows_a_gpu:>12,.0f} rows/s are what one {GPU} trains {MODEL} on, as "
            f"tools/plan_run.py counts: {self.rows_a_gpu / self.rows_a_core:.2f} cores",
        ]


def compare_loaders(config: RunConfig, rounds: int = 5, rows_a_round: int = 4096) -> LoaderComparison:
    """Rows a second of our loader (reading, masking, collating in one process) and of transformers' collator.

    transformers' DataCollatorForLanguageModeling gets the same sequences ready in memory; ours reads them from its
    dataset. Both make micro-batches of the recipe's size.

    Raises:
        ConfigError, DataError, TokenizerError: the recipe masks no tokens, or names no usable data or tokenizer.
    """
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    tokenizer = load_tokenizer(config.tokenizer.path or "")
    objective = build_objective(config.objective, tokenizer)
    mask_prob = getattr(config.objective, "mask_prob", None)
    if mask_prob is None:
        raise ConfigError(
            f"objective.name {config.objective.name}: loaders are compared by their masking, which it does not do; "
            "give a recipe of a masked language model"
        )
    rows = build_rows(train_parts(config), tokenizer, config, objective)
    in_process = config.model_copy(update={"data": config.data.model_copy(update={"num_workers": 0})})
    steps = iter(TrainLoader(rows, objective, in_process))
    global_batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    hf_tokenizer = AutoTokenizer.from_pretrained(config.tokenizer.path)
    collator = DataCollatorForLanguageModeling(hf_tokenizer, mlm_probability=mask_prob)
    features = list(_features(rows, min(rows_a_round, len(rows))))
    next(steps)
    rows_a_core: list[float] = []

    def ours() -> int:
        count = max(1, rows_a_round // global_batch)
        started_s = time.process_time()
        for _ in range(count):
            next(steps)
        rows_a_core.append(count * global_batch / (time.process_time() - started_s))
        return count * global_batch

    def theirs() -> int:
        for start in range(0, len(features), micro):
            collator(features[start : start + micro])
        return len(features)

    comparison = in_turn(ours, theirs, rounds, "rows/s")
    core = sorted(rows_a_core)[len(rows_a_core) // 2]
    return LoaderComparison(comparison, core, _rows_a_gpu(config, tokenizer.vocab_size), config.data.seq_length)


def _rows_a_gpu(config: RunConfig, vocab_size: int) -> float:
    """Rows a second that one GPU trains BERT-base on, at the recipe's length, objective and vocabulary."""
    gpu, model = find_gpu(GPU), load_config(MODEL).model.model_copy(update={"vocab_size": vocab_size})
    flops = training_flops_per_row(config.model_copy(update={"model": model}))
    return gpu.tflops_16bit * TERA * gpu.matrix_efficiency / flops


def _features(rows: RowSource, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        index, local = rows.locate(number)
        yield {"input_ids": [int(token) for sequence in index.row(local) for token in sequence.input_ids]}

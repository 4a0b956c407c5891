"""Rows per second of the loader against transformers' collator, and the rows that a GPU needs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.data.stream.run_datasets import train_parts
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.hardware import TERA, find_gpu
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.training.measure import measure, training_flops_per_row
from tools.benchmark.timing import compare

GPU = "H100"
MODEL = "bert-base"


def compare_loaders(config: RunConfig, rounds: int = 5, rows_per_round: int = 4096) -> list[str]:
    """Compare our loader (reading, masking, collating in one process) with DataCollatorForLanguageModeling.

    The collator gets the same sequences in memory. Both make micro-batches of the recipe's size. The table ends with
    our rows per second of processor time (one worker process on one core), and those that one GPU trains BERT-base on.

    Raises ConfigError if the recipe masks no tokens.
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
    rows = build_rows(train_parts(config.data), tokenizer, config.row_settings)
    objective.read_corpus(rows, config.training.seed)
    data, training = (
        section.model_copy(update=changes)
        for section, changes in ((config.data, {"num_workers": 0}), (config.training, {"batch_ramp": None}))
    )
    in_process = config.model_copy(update={"data": data, "training": training})
    steps = iter(TrainLoader(rows, objective, in_process.data, in_process.training))
    global_batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    hf_tokenizer = AutoTokenizer.from_pretrained(config.tokenizer.path)
    collator = DataCollatorForLanguageModeling(hf_tokenizer, mlm_probability=mask_prob)
    features = list(_features(rows, min(rows_per_round, len(rows))))
    next(steps)
    rows_per_core: list[float] = []

    def ours() -> int:
        count = max(1, rows_per_round // global_batch)
        started_s = time.process_time()
        for _ in range(count):
            next(steps)
        rows_per_core.append(count * global_batch / (time.process_time() - started_s))
        return count * global_batch

    def theirs() -> int:
        for start in range(0, len(features), micro):
            collator(features[start : start + micro])
        return len(features)

    table = compare(ours, theirs, rounds, "rows/s")
    core, gpu = statistics.median(rows_per_core), _rows_per_gpu(config, tokenizer.vocab_size)
    return [
        *table,
        f"{'one-core':<18}{core:>12,.0f} rows/s of {config.data.seq_length} positions, by processor time",
        f"{MODEL + '/' + GPU:<18}{gpu:>12,.0f} rows/s are what one {GPU} trains {MODEL} on, as ctxlm plan "
        f"counts: {gpu / core:.2f} cores",
    ]


def _rows_per_gpu(config: RunConfig, vocab_size: int) -> float:
    """Return the rows per second that one GPU trains BERT-base on with the recipe's length and objective."""
    gpu, model = find_gpu(GPU), load_config(MODEL).model.model_copy(update={"vocab_size": vocab_size})
    flops = training_flops_per_row(measure(config.model_copy(update={"model": model})))
    return gpu.tflops_16bit * TERA * gpu.matrix_efficiency / flops


def _features(rows: RowSource, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        wanted = np.array([number])
        yield {"input_ids": rows.samples(wanted, np.zeros_like(wanted))[0].input_ids.tolist()}

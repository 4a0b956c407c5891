"""Samples of the loader beside transformers' collator, as a ratio."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ctxlm_ds.benchmark.timing import Comparison, in_turn
from ctxlm_ds.config.schema import RunConfig
from ctxlm_ds.data.loader import TrainLoader
from ctxlm_ds.data.samples.build import build_rows
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.tokenizers.load import load_tokenizer


def compare_loaders(config: RunConfig, rounds: int = 5, rows_a_round: int = 4096) -> Comparison:
    """Rows a second of our loader (reading, masking, collating in one process) and of transformers' collator.

    transformers' DataCollatorForLanguageModeling gets the same sequences ready in memory; ours reads them from its
    dataset. Both make micro-batches of the recipe's size.

    Raises:
        ConfigError, DataError, TokenizerError: the recipe is a decoder's, or names no usable data or tokenizer.
    """
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    if config.model.is_decoder:
        raise ConfigError(
            f"model.family {config.model.family}: loaders are compared by their masking, which causal_lm has not; "
            "give a recipe of a masked language model"
        )
    tokenizer = load_tokenizer(config.tokenizer.path or "")
    objective = build_objective(config.objective, tokenizer)
    rows = build_rows(config.data.train, tokenizer, config, objective)
    in_process = config.model_copy(update={"data": config.data.model_copy(update={"num_workers": 0})})
    steps = iter(TrainLoader(rows, objective, in_process))
    global_batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    hf_tokenizer = AutoTokenizer.from_pretrained(config.tokenizer.path)
    collator = DataCollatorForLanguageModeling(hf_tokenizer, mlm_probability=config.objective.mask_prob)
    features = list(_features(rows, min(rows_a_round, len(rows))))

    def ours() -> int:
        count = max(1, rows_a_round // global_batch)
        for _ in range(count):
            next(steps)
        return count * global_batch

    def theirs() -> int:
        for start in range(0, len(features), micro):
            collator(features[start : start + micro])
        return len(features)

    return in_turn(ours, theirs, rounds, "rows/s")


def _features(rows: Any, count: int) -> Iterator[dict[str, list[int]]]:
    for number in range(count):
        index, local = rows.locate(number)
        yield {"input_ids": [int(token) for sample in index.row(local) for token in sample.input_ids]}

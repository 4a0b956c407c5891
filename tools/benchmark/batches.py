"""Training steps of random rows, generated in memory; every side of a benchmark gets the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.collate import count_labels
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.objectives.base import Objective
from ctxlm_ds.recipe.schema import RunConfig

NUM_STEPS = 4
"""Distinct steps, which a side repeats."""


def full_rows(config: RunConfig, objective: Objective) -> list[Step]:
    """Make steps of random rows without padding; every prediction slot is used."""
    draws = np.random.default_rng(config.training.seed)
    assert config.model.vocab_size is not None
    fields, rows = objective.fields(config.data), config.training.micro_batch_size
    per_step = config.training.global_batch_size // rows
    return [
        as_step([Batch.example(fields, rows, draws, config.model.vocab_size) for _ in range(per_step)], objective)
        for _ in range(NUM_STEPS)
    ]


def as_step(batches: Sequence[Batch], objective: Objective) -> Step:
    """Return a step of one rank with its counts; its tensors are in page-locked memory if there is a GPU."""
    counts = {
        term.name: sum(count_labels(term, {name: x.numpy() for name, x in batch.fields.items()}) for batch in batches)
        for term in objective.terms
    }
    num_rows = sum(batch.fields["input_ids"].shape[0] for batch in batches)
    num_tokens = sum(batch.num_tokens for batch in batches)
    batches = [replace(batch, fields=pinned(batch.fields)) for batch in batches]
    return Step(batches, counts, num_tokens, num_rows, epoch=0)


def pinned(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in page-locked memory, from which a GPU copies while it computes; unchanged without one."""
    if not torch.cuda.is_available():
        return dict(fields)
    return {name: tensor.pin_memory() for name, tensor in fields.items()}

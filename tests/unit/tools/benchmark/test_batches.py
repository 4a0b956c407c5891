"""Every side repeats the same steps, whose counts are those of their labels."""

from __future__ import annotations

import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.load import load_config
from tools.benchmark.batches import NUM_STEPS, full_rows

CONFIG = load_config("bert-tiny", ["training.micro_batch_size=2", "training.global_batch_size=6"])


def test_steps_are_full_and_counted() -> None:
    objective = build_objective(CONFIG.objective)
    steps = full_rows(CONFIG, objective)
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert len(step.micro_batches) == 3 and step.rows_consumed == 6
        assert step.num_tokens == 6 * CONFIG.data.seq_length
        for term in objective.terms:
            labels = torch.cat([batch.fields[term.labels[0]] for batch in step.micro_batches])
            assert step.counts[term.name] == int((labels != IGNORE_LABEL).sum()) > 0


def test_all_sides_get_the_same() -> None:
    objective = build_objective(CONFIG.objective)
    first, again = full_rows(CONFIG, objective), full_rows(CONFIG, objective)
    assert torch.equal(first[1].micro_batches[2].fields["input_ids"], again[1].micro_batches[2].fields["input_ids"])
    assert not torch.equal(first[0].micro_batches[0].fields["input_ids"], first[1].micro_batches[0].fields["input_ids"])

"""Lanes over ranks, resumes and evaluations: a row of a batch is always that of the same rank and micro-batch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.preview import preview_rows
from ctxlm_ds.objectives.base import Objective, build_objective
from ctxlm_ds.recipe.schema import RunConfig
from tests.ragged import one_sample
from tests.sample_data import eval_loader, numbered_documents, train_loader
from tests.unit.data.formats.test_lanes import SHAPE, TOKENIZER, config_of, rows_of

LANES, LENGTH, STEPS = 8, 5, 7
Made = tuple[RowSource, Objective, RunConfig]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    config = config_of("lanes", LENGTH, LANES, evaluation={"max_rows": 50})
    objective = build_objective(config.objective, TOKENIZER)
    return rows_of(tmp_path, config, numbered_documents(SHAPE)), objective, config


def tokens_of(batches: list[Batch]) -> list[list[int]]:
    """The tokens of each row, masked ones as they were."""
    rows: list[list[int]] = []
    for batch in batches:
        ids, fields = batch.fields["input_ids"].clone(), batch.fields
        for row, (places, labels) in enumerate(
            zip(fields["prediction_positions"], fields["masked_lm_labels"], strict=True)
        ):
            ids[row, places[labels >= 0]] = labels[labels >= 0]
        rows += [tokens[used > 0].tolist() for tokens, used in zip(ids, fields["sequence_ids"], strict=True)]
    return rows


def lanes_of(made: Made, size: int, start_row: int = 0) -> list[list[int]]:
    """The tokens of each lane in STEPS steps of `size` ranks."""
    lanes: list[list[int]] = [[] for _ in range(LANES)]
    for rank in range(size):
        loader = train_loader(*made, ranks=(rank, size), start_row=start_row)
        for step in itertools.islice(loader, STEPS):
            for index, batch in enumerate(step.micro_batches):
                for row, tokens in enumerate(tokens_of([batch])):
                    lanes[(index * size + rank) * 2 + row] += tokens
        loader.close()
    return lanes


def test_lanes_do_not_depend_on_the_ranks_and_a_resume_continues_them(made: Made) -> None:
    whole = lanes_of(made, 1)
    assert whole == lanes_of(made, 2) == lanes_of(made, 4)
    assert len(set(sum(whole, []))) == LANES * LENGTH * STEPS
    later = lanes_of(made, 2, 3 * LANES)
    assert [lane[: 4 * LENGTH] for lane in later] == [lane[3 * LENGTH :] for lane in whole]


def test_an_evaluation_reads_its_rows_once_in_lanes(made: Made) -> None:
    found = {}
    for size in (1, 2):
        parts = [list(eval_loader(*made, ranks=(rank, size))) for rank in range(size)]
        assert {len(part) for part in parts} == {len(eval_loader(*made, ranks=(0, size)))} == {7 * 4 // size}
        found[size] = tokens_of([batch for group in zip(*parts, strict=True) for batch in group])
    assert found[1] == found[2]
    rows = [row for row in found[1] if row]
    assert len(rows) == 50 and len({token for row in rows for token in row}) == 50 * LENGTH
    # Lane r of eight steps of 8 rows, of which the last lanes have fewer.
    order = [found[1][step * LANES + lane] for lane in range(LANES) for step in range(7)]
    again = build_rows_in_order(made)
    assert [row for row in order if row] == again


def build_rows_in_order(made: Made) -> list[list[int]]:
    rows = made[0]
    samples, _ = rows.samples(*(torch.tensor([range(50), [0] * 50]).numpy()))
    return [one_sample(samples, number).input_ids.tolist() for number in range(50)]


def test_a_preview_of_few_rows_shows_lanes(made: Made) -> None:
    rows, objective, config = made
    larger = config.training.model_copy(update={"global_batch_size": 1000})
    few = config.model_copy(update={"training": larger})
    shown = list(preview_rows(rows, objective, TOKENIZER, few.data, few.training, 3))  # type: ignore[arg-type]
    assert len(shown) == 3 and all("5 of 5 positions" in text.plain for text in shown)

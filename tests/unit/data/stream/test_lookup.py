"""Rows on record are the rows that were trained on, named by source, epoch and number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.data.stream.lookup import BatchRows, SourceRows, summary
from ctxlm_ds.data.stream.preview import preview_planned
from ctxlm_ds.objectives.build import build_objective
from tests.sample_data import FakeTokenizer, locate, random_documents, run_config, write_dataset

TOKENIZER: Any = FakeTokenizer()
BATCH = 8
BLENDS: list[dict[str, Any]] = [
    {"blend": "weighted", "weights": (1, 3)},
    {"blend": "concatenate", "weights": (None, None), "packing": True},
]


def setup(folder: Path, blend: str, weights: tuple[Any, Any], **data: Any) -> Any:
    sources = [{"path": str(folder / "large"), "name": "books"}, {"path": str(folder / "small")}]
    for source, weight, documents in zip(sources, weights, (20, 4), strict=True):
        source |= {} if weight is None else {"weight": weight}
        write_dataset(Path(source["path"]), random_documents(documents, sentences=4, seed=documents))
    settings = {"train": sources, "blend": blend, "sample_format": "doc_sentences", "seq_length": 32, **data}
    config = run_config(data=settings, objective={"name": "masked_lm"})
    objective = build_objective(config.objective, TOKENIZER)
    return build_rows([source["path"] for source in sources], TOKENIZER, config, objective), objective, config


@pytest.mark.parametrize("blend", BLENDS, ids=lambda blend: blend["blend"])
def test_every_row_of_a_stretch_is_named(tmp_path: Path, blend: dict[str, Any]) -> None:
    rows, _, config = setup(tmp_path, **blend)
    batch = BatchRows(rows, config)
    first, count = len(rows) - 5, 40  # across the end of an epoch
    planned = batch.plan(first, count)
    expected: dict[tuple[str, int], list[int]] = {}
    for row, epoch in zip(planned.rows.tolist(), planned.epochs.tolist(), strict=True):
        index, number = locate(rows, row)
        name = "books" if index is rows.indexes[0] else "small"
        expected.setdefault((name, epoch), []).append(number)
    found = batch.by_source(first, count)
    assert {(part.source, part.epoch): part.rows for part in found} == expected
    assert {part.source for part in found} == {"books", "small"}
    titles = batch.titles(first, count)
    assert sorted(titles) == sorted(
        f"position {first + place}: {name} row {number} in epoch {planned.epochs[place]}"
        for place, (index, number) in enumerate(locate(rows, row) for row in planned.rows.tolist())
        for name in ["books" if index is rows.indexes[0] else "small"]
    )


def test_what_is_shown_is_what_was_trained_on(tmp_path: Path) -> None:
    """The text of a batch in the middle of a run, masks and all, from its place in the stream alone."""
    rows, objective, config = setup(tmp_path, **BLENDS[0])
    first = 5 * BATCH
    step = next(iter(TrainLoader(rows, objective, config, start_row=first)))
    ids = np.concatenate([batch.fields["input_ids"].numpy() for batch in step.micro_batches])
    batch = BatchRows(rows, config)
    planned, titles = batch.plan(first, BATCH), batch.titles(first, BATCH)
    shown = list(preview_planned(rows, objective, TOKENIZER, config, planned, titles))
    assert len(shown) == len(ids) == BATCH
    for text, row, title in zip(shown, ids, titles, strict=True):
        heading, line = text.plain.splitlines()
        assert heading.startswith(title)
        tokens = [token.strip("[]").split("→")[0] for token in line.split()]
        assert tokens == [TOKENIZER.id_to_token(token_id).strip("[]") for token_id in row.tolist() if token_id != 0]


def test_a_summary_is_short() -> None:
    found = [SourceRows("books", 0, list(range(100, 112))), SourceRows("wiki", 2, [7])]
    assert summary(found) == "books epoch 0 rows 100, 101, 102, 103, 104, 105, 106, 107 and 4 more; wiki epoch 2 rows 7"

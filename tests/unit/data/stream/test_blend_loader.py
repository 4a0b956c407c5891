"""Blended rows through the loader: the same whatever deals them out, exactly continued, masked by their own epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.stream.blend import train_stream
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.objectives.base import build_objective
from tests.sample_data import FakeTokenizer, random_documents, run_config, write_dataset
from tests.unit.data.stream.test_loader import Setup, global_rows, steps_of

TOKENIZER: Any = FakeTokenizer()
BLENDS: dict[str, dict[str, Any]] = {
    "weighted": {"sources": [{"weight": 1}, {"weight": 3}]},
    "megatron": {"sources": [{"weight": 1}, {"weight": 3}], "split": "80,20"},
    "concatenate": {"sources": [{}, {"epochs": 2.5}], "packing": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blended")
    for seed, (name, documents) in enumerate((("large", 30), ("small", 5))):
        write_dataset(folder / name, random_documents(documents, sentences=4, seed=seed))
    return folder


def setup(folder: Path, blend: str, **training: Any) -> Setup:
    data = dict(BLENDS[blend], blend=blend, sample_format="doc_sentences", seq_length=32)
    places = [{"path": str(folder / name)} for name in ("large", "small")]
    data["train"] = [place | source for place, source in zip(places, data.pop("sources"), strict=True)]
    config = run_config(data=data, training=training, objective={"name": "masked_lm"})
    objective = build_objective(config.objective, TOKENIZER)
    return build_run_rows(config.row_settings, TOKENIZER, objective).train, objective, config


def rows_of(parts: list[list[Step]]) -> list[bytes]:
    return sum(global_rows(parts), [])


@pytest.mark.parametrize("blend", BLENDS)
def test_ranks_and_a_new_batch_size_change_nothing(folder: Path, blend: str) -> None:
    """Ten steps of 8, then as many rows again in steps of 20 on two ranks: the rows of twenty steps of 8."""
    expected = rows_of([steps_of(setup(folder, blend), 20)])
    first = rows_of([steps_of(setup(folder, blend, micro_batch_size=4), 10)])
    other = setup(folder, blend, global_batch_size=20, micro_batch_size=5)
    then = rows_of([steps_of(other, 4, rank, 2, start_row=80) for rank in range(2)])
    assert first + then == expected


@pytest.mark.parametrize("blend", BLENDS)
def test_masks_change_with_the_source_s_own_epoch(folder: Path, blend: str) -> None:
    """The small source comes round often: its rows come again with other masks."""
    made = setup(folder, blend)
    rows = rows_of([steps_of(made, 40)])
    planned = train_stream(made[0], made[2].data, made[2].training).at(np.arange(320))
    small = planned.rows >= len(made[0].indexes[0])
    assert planned.epochs[small].max() > planned.epochs[~small].max() + 1
    seen: dict[int, set[bytes]] = {}
    for row, content in zip(planned.rows[small].tolist(), np.array(rows, dtype=object)[small], strict=True):
        seen.setdefault(row, set()).add(content)
    times = {row: int(np.sum(planned.rows == row)) for row in seen}
    assert max(times.values()) > 2
    # Short rows have few places to mask, so that some masks come again by chance; fixed ones would be a tenth of this.
    assert sum(map(len, seen.values())) > 0.7 * sum(times.values())

"""Rows in lanes beside a plain list of an epoch's tokens: what each row holds, and which row follows which."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.index.record import SourcePart
from ctxlm_ds.data.stream.blend import train_stream
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.schema import RunConfig
from tests.ragged import one_sample
from tests.sample_data import Documents, FakeTokenizer, numbered_documents, run_config, write_dataset

TOKENIZER = FakeTokenizer(vocab_size=10_000)
BEGIN, END = TOKENIZER.cls_id, TOKENIZER.sep_id
SHAPE = [[3, 4], [20], [1, 0, 2], [9, 9, 2], [33], [0], [2, 2, 2, 2]] * 12


def config_of(sample_format: str, seq_length: int = 5, lanes: int = 4, **sections: dict[str, Any]) -> RunConfig:
    return run_config(
        data={"sample_format": sample_format, "seq_length": seq_length, "num_workers": 0},
        training={"global_batch_size": lanes, "micro_batch_size": 2, "seed": 7},
        model={"family": "roberta"}, objective={"name": "masked_lm"}, **sections,
    )  # fmt: skip


def rows_of(folder: Path, config: RunConfig, documents: Documents, part: tuple[int, int] | None = None) -> RowSource:
    prefix = folder / "d"
    if not prefix.with_suffix(".idx").exists():
        write_dataset(prefix, documents)
    return build_rows([SourcePart(str(prefix), part)], TOKENIZER, config.row_settings)


def read(rows: RowSource, epoch: int) -> list[list[int]]:
    """The tokens of every row of an epoch."""
    numbers = np.arange(len(rows))
    samples, starts = rows.samples(numbers, np.full_like(numbers, epoch))
    assert starts.tolist() == list(range(len(rows) + 1))
    return [one_sample(samples, number).input_ids.tolist() for number in range(len(rows))]


def order_of(stream: list[int], units: list[list[int]]) -> list[int]:
    """The numbers of the units in an order of the stream; every token is of one unit."""
    of_token = {token: number for number, unit in enumerate(units) for token in unit}
    order: list[int] = []
    for number in (of_token[token] for token in stream):
        if not order or order[-1] != number:
            order.append(number)
    return order


def test_an_epoch_is_every_document_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    documents = numbered_documents(SHAPE)
    units = [sum(document, []) for document in documents]
    rows = rows_of(tmp_path, config_of("lanes"), documents)
    orders = []
    for epoch in range(3):
        read_rows = read(rows, epoch)
        stream = sum(read_rows, [])
        order = order_of(stream, units)
        assert len(set(order)) == len(order)
        whole = sum((units[number] for number in order), [])
        assert whole[: len(stream)] == stream
        total = sum(map(len, units))
        assert {len(row) for row in read_rows} == {5} and total - 5 < len(stream) <= total
        orders.append(order)
    assert orders[0] != orders[1] != orders[2] and orders[0] != sorted(orders[0])
    assert read(rows, 1) == read(rows_of(tmp_path, config_of("lanes"), documents), 1)


def test_both_directions_have_their_own_order_of_marked_sentences(tmp_path: Path) -> None:
    documents = numbered_documents(SHAPE)
    units = [sentence for document in documents for sentence in document if sentence]
    rows = rows_of(tmp_path, config_of("bidirectional_lanes"), documents)
    found = {}
    for epoch in range(2):
        halves = [(row[:6], row[6:]) for row in read(rows, epoch)]
        for direction, mark in ((0, BEGIN), (1, END)):
            parts = [half[direction] for half in halves]
            # The last token of a row is the first of the next one.
            assert all(len(part) == 6 for part in parts)
            assert all(one[-1] == other[0] for one, other in zip(parts, parts[1:], strict=False))
            stream = [token for part in parts for token in part[:-1]]
            order = order_of([token for token in stream if token not in (BEGIN, END)], units)
            forward = [[mark, *(units[number] if direction == 0 else units[number][::-1])] for number in order]
            assert sum(forward, [])[: len(stream)] == stream
            assert len(set(order)) == len(order) >= len(units) - 3
            found[epoch, direction] = order
    assert len({tuple(order) for order in found.values()}) == 4


def test_a_part_of_the_documents_is_read_alone(tmp_path: Path) -> None:
    documents = numbered_documents(SHAPE)
    rows = rows_of(tmp_path, config_of("lanes"), documents, (3, 9))
    expected = {token for document in documents[3:9] for sentence in document for token in sentence}
    stream = sum(read(rows, 0), [])
    assert set(stream) <= expected and len(expected) - len(stream) < 5
    assert rows.indexes[0].meta["documents"] == 6


@pytest.mark.parametrize("sample_format", ["lanes", "bidirectional_lanes"])
def test_row_r_of_a_step_continues_row_r_of_the_step_before(tmp_path: Path, sample_format: str) -> None:
    documents = numbered_documents(SHAPE)
    config = config_of(sample_format, lanes=6)
    rows = rows_of(tmp_path, config, documents)
    stream, whole = train_stream(rows, config.data, config.training), {epoch: read(rows, epoch) for epoch in range(3)}
    steps = len(rows) // 6
    seen = []
    for step in range(2 * steps + 1):
        planned = stream.at(np.arange(6 * step, 6 * step + 6))
        assert set(planned.epochs.tolist()) == {step // steps} == {stream.epoch_of(6 * step)}
        seen.append([whole[step // steps][row] for row in planned.rows.tolist()])
    for lane in range(6):
        for epoch in range(2):
            ours = [row[lane] for row in seen[epoch * steps : (epoch + 1) * steps]]
            assert ours == whole[epoch][lane * steps : (lane + 1) * steps]


def test_refusals(tmp_path: Path) -> None:
    documents = numbered_documents([[3, 4]])
    with pytest.raises(DataError, match=r"7 tokens are less than a row of data\.seq_length 8"):
        rows_of(tmp_path, config_of("lanes", 8), documents)
    config = config_of("lanes", 2)
    rows = rows_of(tmp_path, config, documents)
    with pytest.raises(DataError, match="3 rows, fewer than the 4 lanes"):
        train_stream(rows, config.data, config.training)
    write_dataset(tmp_path / "ended", documents, eod_id=END)
    with pytest.raises(DataError, match="again without --append-eod"):
        build_rows([tmp_path / "ended"], TOKENIZER, config_of("bidirectional_lanes", 2).row_settings)


@pytest.mark.parametrize(
    ("sections", "path", "text"),
    [
        ({"data": {"train": ["a", "b"]}}, "data.train", "2 sources: data.sample_format lanes reads one in lanes"),
        ({"data": {"train": [{"path": "a", "epochs": 2}]}}, "data.blend", "blends nothing"),
        ({"training": {"batch_ramp": [2, 2, 100]}}, "training.batch_ramp", "the batch cannot grow"),
        (
            {"data": {"validation": [{"name": "a", "path": "a"}]}, "evaluation": {"max_rows": 7}},
            "evaluation.max_rows",
            "7 rows in 4 lanes, .* set at least 8, better 32",
        ),
    ],
)
def test_lanes_have_one_source_and_one_batch_size(sections: dict[str, Any], path: str, text: str) -> None:
    config = config_of("lanes").model_dump(mode="json")
    for section, settings in sections.items():
        config[section] |= settings
    problems = {problem.path: problem.text for problem in find_problems(RunConfig.model_validate(config))}
    assert re.search(text, problems[path])


def test_a_resume_keeps_the_lanes() -> None:
    assert "training.global_batch_size" in config_of("lanes").fixed_settings
    assert "training.global_batch_size" not in config_of("chunks").fixed_settings

"""A shard's local order, its rectangles and its copies, against numpy's own indexing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxlm_ds.parallel.placement import Rectangle, Shard

SHAPES = st.sampled_from([(), (1,), (7,), (0,), (5, 3), (6, 1), (1, 4), (0, 3), (4, 2, 3), (9, 8)])


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    shape = draw(SHAPES)
    num_rows, num_columns = Shard.whole(shape).matrix_shape
    bounds = sorted(draw(st.lists(st.integers(0, num_rows), min_size=0, max_size=6)))
    rows = tuple(zip(bounds[0::2], bounds[1::2], strict=False))
    columns = sorted(draw(st.tuples(st.integers(0, num_columns), st.integers(0, num_columns))))
    return Shard(shape, rows, (columns[0], columns[1]))


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """Each element holds its own place in the flat parameter."""
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


def local_order(shard: Shard) -> np.ndarray:
    """The shard's elements picked by numpy, from index lists."""
    matrix = numbered(shard.shape).reshape(shard.matrix_shape)
    picked = [row for start, stop in shard.rows for row in range(start, stop)]
    return matrix[np.ix_(picked, range(*shard.columns))].reshape(-1)


def mlp_up(rank: int) -> Shard:
    return Shard((8, 3), ((4 * rank, 4 * rank + 4),), (0, 3))


@settings(max_examples=300)
@given(shard=shards(), data=st.data())
def test_extract_place_and_rectangles_agree_with_numpy(shard: Shard, data: st.DataObject) -> None:
    expected = local_order(shard)
    full = torch.from_numpy(numbered(shard.shape))
    assert shard.num_elements == expected.size
    assert np.array_equal(shard.extract(full).numpy(), expected)

    start = data.draw(st.integers(0, shard.num_elements))
    length = data.draw(st.integers(0, shard.num_elements - start))
    found = shard.rectangles(start, length)
    assert len(found) <= 3 * len(shard.rows)
    matrix = full.reshape(shard.matrix_shape).numpy()
    place = start
    for r in found:
        assert r.offset == place
        values = matrix[r.row_start : r.row_stop, r.column_start : r.column_stop].reshape(-1)
        assert r.num_elements == values.size > 0
        assert np.array_equal(values, expected[place : place + values.size])
        place += values.size
    assert place == start + length

    target = torch.full(shard.shape, -1.0)
    shard.place(target, torch.from_numpy(expected[start : start + length].copy()), start)
    kept = np.isin(numbered(shard.shape), expected[start : start + length])
    assert np.array_equal(target.numpy(), np.where(kept, numbered(shard.shape), -1.0))


@given(shard=shards())
def test_json_round_trip(shard: Shard) -> None:
    described = json.loads(json.dumps(shard.to_json()))
    assert (described is None) == shard.is_whole
    back = Shard.from_json(list(shard.shape), described)
    if shard.num_elements or not shard.is_whole:
        assert back == shard
    assert np.array_equal(local_order(back), local_order(shard))


def test_whole() -> None:
    for shape in [(), (7,), (5, 3), (4, 2, 3)]:
        whole = Shard.whole(shape)
        assert whole.is_whole and whole.to_json() is None
        assert whole.num_elements == int(np.prod(shape))
    assert not mlp_up(1).is_whole


def test_equal_shards_are_written_alike() -> None:
    """Blocks that touch are one block, so the query/key/value rows of the only rank are the whole parameter."""
    whole = Shard((6, 2), ((0, 2), (2, 4), (4, 4), (4, 6)), (0, 2))
    assert whole == Shard.whole((6, 2)) and whole.is_whole
    assert hash(whole) == hash(Shard.whole((6, 2)))


def test_a_range_across_blocks_of_rows() -> None:
    shard = Shard((6, 4), ((0, 2), (4, 6)), (0, 4))
    assert shard.rectangles(2, 10) == [
        Rectangle(2, 0, 1, 2, 4), Rectangle(4, 1, 2, 0, 4), Rectangle(8, 4, 5, 0, 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((4, 2), ((0, 5),), (0, 2)),
        ((4, 2), ((2, 4), (0, 2)), (0, 2)),
        ((4, 2), ((0, 3), (2, 4)), (0, 2)),
        ((4, 2), ((3, 2),), (0, 2)),
        ((4, 2), ((-1, 2),), (0, 2)),
        ((4, 2), ((0, 4),), (0, 3)),
        ((4, 2), ((0, 4),), (2, 1)),
        ((4,), ((0, 4),), (0, 4)),
        ((-4, 2), (), (0, 0)),
        ((4, 2.0), (), (0, 0)),
        ((4, 2), ((True, 2),), (0, 2)),
    ],
)
def test_blocks_outside_the_parameter_are_refused(shape: tuple, rows: tuple, columns: tuple) -> None:
    with pytest.raises(ValueError):
        Shard(shape, rows, columns)


@pytest.mark.parametrize(
    "described",
    [
        [],
        3,
        {"rows": 3},
        {"rows": [1, 2]},
        {"rows": [[0, 1, 2]]},
        {"rows": [[0, "1"]]},
        {"columns": [0, 1]},
        {"rows": [[0, 1]], "columns": None},
        {"rows": [[0, 1]], "columns": [0]},
        {"rows": [[0, 1]], "more": 1},
    ],
)
def test_descriptions_that_are_none_are_refused(described: object) -> None:
    with pytest.raises(ValueError):
        Shard.from_json((4, 2), described)  # type: ignore[arg-type]


def test_ranges_and_tensors_that_do_not_fit_are_refused() -> None:
    shard = mlp_up(0)
    for start, length in [(-1, 2), (0, 13), (12, 1), (5, -1)]:
        with pytest.raises(ValueError):
            shard.rectangles(start, length)
    with pytest.raises(ValueError):
        shard.extract(torch.zeros(3, 8))
    with pytest.raises(ValueError):
        shard.place(torch.zeros(8, 3), torch.zeros(13))
    with pytest.raises(ValueError):
        shard.place(torch.zeros(3, 8).t(), torch.zeros(2))

"""The index of the chunks: pieces must cover every parameter, shard by shard, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.checkpoint.chunk_index import ChunkWriter, merge_index
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.placement import VOCABULARY, Shard, shard_of


def test_whole_parameters_have_no_shard_entry(tmp_path: Path) -> None:
    """The form of checkpoints from before there were shards."""
    value = torch.arange(6.0).reshape(3, 2)
    writer = ChunkWriter(tmp_path, 0)
    writer.add("a", "weight", (3, 2), 0, value.flatten(), Shard.whole((3, 2)))
    writer.add("b", "weight", (3, 2), 0, value[:2].flatten(), Shard((3, 2), ((0, 2),), (0, 2)))
    writer.add("b", "weight", (3, 2), 0, value[2:].flatten(), Shard((3, 2), ((2, 3),), (0, 2)))
    writer.add("c", "weight", (3, 2), 0, value[:, :1].flatten(), Shard((3, 2), ((0, 3),), (0, 1)))
    writer.add("c", "weight", (3, 2), 0, value[:, 1:].flatten(), Shard((3, 2), ((0, 3),), (1, 2)))
    index = merge_index(tmp_path, [writer.write().value], {})
    file = "weights-00000.safetensors"
    assert index["parameters"]["a"]["pieces"]["weight"] == [{"file": file, "key": "a", "start": 0, "length": 6}]
    assert index["parameters"]["b"]["pieces"]["weight"] == [
        {"file": file, "key": "b", "start": 0, "length": 4, "shard": {"rows": [[0, 2]]}},
        {"file": file, "key": "b@0", "start": 0, "length": 2, "shard": {"rows": [[2, 3]]}},
    ]
    assert index["parameters"]["c"]["pieces"]["weight"][1]["shard"] == {"rows": [[0, 3]], "columns": [1, 2]}
    for name in "abc":
        assert torch.equal(CheckpointReader(tmp_path).read_full(name), value)


def piece(shard: dict[str, Any] | None, start: int, length: int, file: str = "f0") -> dict[str, Any]:
    plain = {"file": file, "key": "p", "start": start, "length": length}
    return plain if shard is None else {**plain, "shard": shard}


LEFT, RIGHT = {"rows": [[0, 4]], "columns": [0, 2]}, {"rows": [[0, 4]], "columns": [2, 4]}


def cut(*pieces: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank a piece of 4 rows and columns."""
    return [{"p": {"shape": [4, 4], "pieces": {"weight": [listed]}}} for listed in pieces]


def _parts(*ranges: tuple[int, int], shape: tuple[int, ...] = (10,), kind: str = "weight") -> list[dict[str, Any]]:
    """One rank a piece of a whole parameter."""
    pieces = [piece(None, start, stop - start, f"f{rank}") for rank, (start, stop) in enumerate(ranges)]
    return [{"p": {"shape": list(shape), "pieces": {kind: [listed]}}} for listed in pieces]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (cut(piece(LEFT, 0, 8)), "rows 0..4 of columns 2..4 are in no chunk"),
        (cut(piece(LEFT, 0, 7), piece(RIGHT, 0, 8)), r"rows 0..4 of columns 0..2: elements 7..8 are in no chunk"),
        (cut(piece(LEFT, 0, 8), piece(RIGHT, 0, 5), piece(RIGHT, 6, 2)), "columns 2..4: elements 5..6 are in no chunk"),
        (cut(piece(LEFT, 0, 8), piece(RIGHT, 0, 8), piece(RIGHT, 0, 8)), "columns 2..4: chunks overlap at element 0"),
        (cut(piece(LEFT, 0, 8), piece(RIGHT, 0, 9)), "elements 8..9 are outside the shard"),
        (cut(piece(LEFT, 0, 8), piece({"rows": [[0, 4]], "columns": [1, 4]}, 0, 12)), "overlap at row 0, column 1"),
        (cut(piece(None, 0, 16), piece(LEFT, 0, 8)), "chunks overlap at row 0, column 0"),
        (cut(piece({"rows": [[0, 1], [2, 4]]}, 0, 12)), "rows 1..2 of columns 0..4 are in no chunk"),
        (cut(piece({"rows": [[1, 4]]}, 0, 12)), "rows 0..1 of columns 0..4 are in no chunk"),
        (cut(piece({"rows": [[0, 3]]}, 0, 12), piece({"rows": [[2, 4]]}, 0, 8)), "overlap at row 2, column 0"),
        (cut(piece(LEFT, 0, 8), piece({"rows": [[0, 2]], "columns": [2, 4]}, 0, 4)), "rows 2..4 of columns 2..4"),
        (cut(piece({"rows": [[0, 5]]}, 0, 20)), "are not ascending ranges of 4 rows"),
        (_parts((0, 4), (5, 10)), "elements 4..5 are in no chunk"),
        (_parts((0, 4)), "elements 4..10 are in no chunk"),
        (_parts((1, 10)), "elements 0..1 are in no chunk"),
        (_parts((0, 6), (5, 10)), "chunks overlap at element 5"),
        (_parts((0, 10), (0, 10)), "chunks overlap at element 0"),
        (_parts((0, 10), (10, 12)), "elements 10..12 are outside its shape"),
        (_parts((0, 10), kind="exp_avg"), "no rank wrote its weight"),
        (_parts((0, 5)) + _parts((5, 10), shape=(5, 2)), r"shape \(5, 2\) on rank 1, \(10,\) before"),
    ],
)
def test_a_broken_covering_is_refused(tmp_path: Path, parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"p.*{message}"):
        merge_index(tmp_path, parts, {})
    assert list(tmp_path.iterdir()) == []


def test_pieces_come_in_any_order(tmp_path: Path) -> None:
    index = merge_index(tmp_path, _parts((5, 10), (0, 2), (2, 5)), {})
    assert [piece["start"] for piece in index["parameters"]["p"]["pieces"]["weight"]] == [0, 2, 5]


def test_a_third_piece_of_the_same_start_has_a_key_of_its_own(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 0)
    value = torch.arange(4.0)
    for row in range(4):
        writer.add("a", "weight", (4,), 0, value[row : row + 1], Shard((4,), ((row, row + 1),), (0, 1)))
    index = merge_index(tmp_path, [writer.write().value], {})
    assert [p["key"] for p in index["parameters"]["a"]["pieces"]["weight"]] == ["a", "a@0", "a@0+2", "a@0+3"]
    assert torch.equal(CheckpointReader(tmp_path).read_full("a"), value)


def test_an_empty_shard_writes_nothing(tmp_path: Path) -> None:
    """The last ranks of a padded vocabulary may hold no row of it."""
    value = torch.arange(10.0).reshape(5, 2)
    writers = [ChunkWriter(tmp_path, rank) for rank in range(4)]
    for rank, writer in enumerate(writers):
        shard = shard_of("word_embeddings.weight", VOCABULARY, (5, 2), 4, rank, vocab_multiple=2)
        assert shard.num_rows == [2, 2, 1, 0][rank]
        writer.add("word_embeddings.weight", "weight", (5, 2), 0, shard.extract(value), shard)
    index = merge_index(tmp_path, [writer.write().value for writer in writers], {})
    assert len(index["parameters"]["word_embeddings.weight"]["pieces"]["weight"]) == 3
    assert torch.equal(CheckpointReader(tmp_path).read_full("word_embeddings.weight"), value)
    empty = shard_of("word_embeddings.weight", VOCABULARY, (5, 2), 4, 3, vocab_multiple=2)
    assert CheckpointReader(tmp_path).read("word_embeddings.weight", shard=empty).numel() == 0


def test_pieces_that_do_not_fit_their_shard_are_refused(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 0)
    shard = Shard((4, 4), ((0, 2),), (0, 4))
    for shape, start, length in (((4, 4), 2, 7), ((4, 4), -1, 2), ((4, 5), 0, 8)):
        with pytest.raises(AssertionError):
            writer.add("p", "weight", shape, start, torch.zeros(length), shard)
    writer.add("p", "weight", (4, 4), 0, torch.zeros(8), shard)
    writer.add("p", "weight", (4, 4), 0, torch.ones(8), Shard((4, 4), ((2, 4),), (0, 4)))
    merge_index(tmp_path, [writer.write().value], {})
    reader = CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match=r"has shape \(4, 4\), a shard of \(4, 5\) was asked for"):
        reader.read("p", shard=Shard.whole((4, 5)))
    with pytest.raises(CheckpointError, match="the shard of p has 8 elements, 8..9 was asked for"):
        reader.read("p", start=8, length=1, shard=shard)


def test_a_rank_without_pieces_writes_no_file(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 1)
    writer.add("padding", "weight", (4,), 4, torch.empty(0))
    assert writer.write().value == {"padding": {"shape": [4], "pieces": {}}}
    assert list(tmp_path.iterdir()) == []

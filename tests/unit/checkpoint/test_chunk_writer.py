"""Pieces that a rank writes: their keys in its files, empty ones, and pieces that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctxlm_ds.checkpoint.chunk_index import merge_index
from ctxlm_ds.checkpoint.chunk_writer import ChunkWriter
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.placement import VOCABULARY, Shard, shard_of


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
    with pytest.raises(CheckpointError, match="elements 2..9 are outside its shard of 8"):
        writer.add("p", "weight", (4, 4), 2, torch.zeros(7), shard)
    with pytest.raises(CheckpointError, match=r"a shard of shape \(4, 4\), the parameter has \(4, 5\)"):
        writer.add("p", "weight", (4, 5), 0, torch.zeros(8), shard)
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


@pytest.mark.parametrize(
    ("start", "values", "message"),
    [
        (3, torch.zeros(2), r"elements 3..5 are outside its shape \(2, 2\)"),
        (-1, torch.zeros(2), "elements -1..1 are outside"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(tmp_path: Path, start: int, values: torch.Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ChunkWriter(tmp_path, 0).add("p", "weight", (2, 2), start, values)

"""Pieces that are ranges of shards: any cut of a matrix reads back as any other, and only the bytes needed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxlm_ds.checkpoint import reader as reader_module
from ctxlm_ds.checkpoint.chunk_index import ChunkWriter, TensorFileReader, merge_index
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.placement import Shard, Split, shard_of

SHAPES = {"matrix": (9, 7), "bias": (12,), "scale": (), "cube": (4, 2, 3)}


def random_shards(shape: tuple[int, ...], drawn: random.Random) -> list[Shard]:
    """Cut a matrix into columns, and each of those into shards of interleaved blocks of rows."""
    num_rows, num_columns = Shard.whole(shape).matrix_shape
    cuts = sorted({0, num_columns, *drawn.choices(range(num_columns + 1), k=drawn.randrange(3))})
    shards = []
    for columns in zip(cuts, cuts[1:], strict=False):
        blocks = sorted({0, num_rows, *drawn.choices(range(num_rows + 1), k=drawn.randrange(6))})
        owners = [drawn.randrange(3) for _ in blocks[1:]]
        for owner in sorted(set(owners)):
            rows = [b for b, o in zip(zip(blocks, blocks[1:], strict=False), owners, strict=False) if o == owner]
            shards.append(Shard(shape, tuple(rows), columns))
    return shards


def write_shards(folder: Path, values: dict[str, torch.Tensor], seed: int, ranks: int = 3) -> dict[str, Any]:
    """Each shard in random flat pieces, dealt out to ranks."""
    drawn = random.Random(seed)
    writers = [ChunkWriter(folder, rank) for rank in range(ranks)]
    for name, value in values.items():
        for shard in random_shards(tuple(value.shape), drawn):
            flat = shard.extract(value)
            bounds = [0, *sorted(drawn.choices(range(flat.numel() + 1), k=drawn.randrange(4))), flat.numel()]
            for start, end in zip(bounds, bounds[1:], strict=False):
                drawn.choice(writers).add(name, "weight", value.shape, start, flat[start:end], shard)
    return merge_index(folder, [writer.write().value for writer in writers], {})


def numbered() -> dict[str, torch.Tensor]:
    return {name: torch.arange(float(np.prod(shape))).reshape(shape) for name, shape in SHAPES.items()}


@settings(max_examples=80)
@given(data=st.data())
def test_any_range_of_any_shard_from_any_shards(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("shards")
    values = numbered()
    write_shards(folder, values, data.draw(st.integers(0, 10**6)))
    reader = CheckpointReader(folder)
    for name, value in values.items():
        assert torch.equal(reader.read_full(name), value)
        for target in random_shards(tuple(value.shape), random.Random(data.draw(st.integers(0, 10**6)))):
            expected = target.extract(value)
            start = data.draw(st.integers(0, target.num_elements))
            length = data.draw(st.integers(0, target.num_elements - start))
            assert torch.equal(reader.read(name, start=start, length=length, shard=target), expected[start:][:length])
            assert torch.equal(reader.read(name, shard=target), expected)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each read of a file."""
    found: list[int] = []
    original = TensorFileReader.read_into

    def counted(self: TensorFileReader, key: str, length: int, first: int, target: torch.Tensor) -> None:
        found.append(target.numel())
        original(self, key, length, first, target)

    monkeypatch.setattr(TensorFileReader, "read_into", counted)
    return found


def test_rows_read_in_several_bands(tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of another width go through a buffer of bounded size."""
    monkeypatch.setattr(reader_module, "READ_ELEMENTS", 64)
    value = torch.arange(40.0 * 12).reshape(40, 12)
    writer = ChunkWriter(tmp_path, 0)
    writer.add("w", "weight", value.shape, 0, value.flatten())
    merge_index(tmp_path, [writer.write().value], {})
    for rank in range(4):
        target = Shard((40, 12), ((0, 40),), (3 * rank, 3 * rank + 3))
        assert torch.equal(CheckpointReader(tmp_path).read("w", shard=target), target.extract(value))
    assert 0 < max(reads) <= 64


def test_only_the_bytes_needed_are_read(tmp_path: Path, reads: list[int]) -> None:
    value = torch.arange(24.0 * 4).reshape(24, 4)
    writers = [ChunkWriter(tmp_path, rank) for rank in range(4)]
    for rank, writer in enumerate(writers):
        shard = shard_of("qkv", Split("rows", (8, 8, 8)), value.shape, 4, rank)
        writer.add("w", "weight", value.shape, 0, shard.extract(value), shard)
    merge_index(tmp_path, [writer.write().value for writer in writers], {})
    reader = CheckpointReader(tmp_path)
    for size in (1, 2, 4):
        for rank in range(size):
            shard = shard_of("qkv", Split("rows", (8, 8, 8)), value.shape, size, rank)
            reads.clear()
            assert torch.equal(reader.read("w", shard=shard), shard.extract(value))
            assert sum(reads) == shard.num_elements
    reads.clear()
    assert torch.equal(reader.read("w", start=30, length=9), value.flatten()[30:39])
    assert sum(reads) == 9


JUNK: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 10**15, 10**40, 1.5, "", "x", "..", "a/b", "\0", "\ud800", [], [0], [[0, 1]],
    [[-1, 2]], [[3, 1]], [[0, 10**15]], {}, {"rows": []}, {"rows": [[0, 2]], "columns": [0, 10**9]}, [10**15, 10**15],
    [10**40, 0],
]  # fmt: skip


def _places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(document, dict):
        for key in document:
            found += _places(document[key], (*path, key))
    elif isinstance(document, list):
        for number, item in enumerate(document):
            found += _places(item, (*path, number))
    return found


def _mutated(document: Any, place: tuple[Any, ...], action: str, junk: Any) -> Any:
    copy = json.loads(json.dumps(document))
    parent = copy
    for key in place[:-1]:
        parent = parent[key]
    last = place[-1]
    if action == "replace":
        parent[last] = junk
    elif action == "remove":
        del parent[last]
    elif isinstance(parent, list):
        parent.append(parent[last])
    else:
        parent["shard"] = junk
    return copy


@settings(max_examples=400)
@given(data=st.data())
def test_a_mutated_index_is_an_error_or_reads_as_before(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Never another exception, nor a result larger than the files could fill."""
    folder = tmp_path_factory.getbasetemp() / "mutated"
    values = {"matrix": numbered()["matrix"], "bias": numbered()["bias"]}
    if not folder.exists():
        folder.mkdir()
        (folder / "intact.json").write_text(json.dumps(write_shards(folder, values, 5)))
    index = json.loads((folder / "intact.json").read_text())
    place = data.draw(st.sampled_from(_places(index)))
    action = data.draw(st.sampled_from(["replace", "replace", "remove", "repeat"]))
    mutated = _mutated(index, place, action, data.draw(st.sampled_from(JUNK)))
    (folder / "index.json").write_text(json.dumps(mutated))
    try:
        reader = CheckpointReader(folder)
        found = {name: reader.read_full(name) for name in reader.names()}
        again = {name: reader.read(name, shard=Shard.whole(reader.shape(name))) for name in reader.names()}
    except CheckpointError:
        return
    for name, value in found.items():
        assert torch.equal(again[name], value.flatten())
        assert value.numel() <= 4 * sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("shape", [[10**12], [10**9, 10**9]])
def test_no_room_is_made_for_what_the_files_cannot_hold(tmp_path: Path, shape: list[int]) -> None:
    writer = ChunkWriter(tmp_path, 0)
    writer.add("p", "weight", (4,), 0, torch.zeros(4))
    merge_index(tmp_path, [writer.write().value], {})
    index = json.loads((tmp_path / "index.json").read_text())
    index["parameters"]["p"]["shape"] = shape
    index["parameters"]["p"]["pieces"]["weight"][0]["length"] = int(np.prod(shape, dtype=object))
    (tmp_path / "index.json").write_text(json.dumps(index))
    reader = CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="cannot read p"):
        reader.read_full("p")
    half = Shard(tuple(shape), ((0, shape[0] // 2),), (0, int(np.prod(shape[1:], dtype=object))))
    with pytest.raises(CheckpointError, match="cannot read p"):
        reader.read("p", shard=half)

"""Files of a teacher's outputs: rows in any order, damaged files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from ctxlm_ds.errors import DataError
from ctxlm_ds.export.stored_outputs import Outputs, Part
from ctxlm_ds.export.stored_rows import StoredRows, finished_entry, write_shard

ROWS, SHARD = 10, 4
SHAPES = {"hidden_states.0": [3, 2], "x": [5]}


def written(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Outputs, dict[str, torch.Tensor]]:
    """Outputs of random values in files of SHARD rows."""
    folder.mkdir(exist_ok=True)
    code = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(ROWS, *shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    outputs = Outputs({}, code, SHAPES, SHARD, [Part("train", ROWS, [])], None)
    files = {
        name: write_shard(folder / name, {key: value[first:stop] for key, value in values.items()}, code)
        for name, _, first, stop in outputs.shards()
    }
    return replace(outputs, files=files), values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_in_any_order_and_missing_ones_are_zero(tmp_path: Path, dtype: torch.dtype) -> None:
    outputs, values = written(tmp_path, dtype)
    rows = StoredRows(tmp_path, outputs, "train", list(SHAPES))
    rows.check_files()
    for positions in ([0], [2, 3, 4, 5], [9, 8, 0, 1], [7, 8, 9], [3, 3], list(range(ROWS))):
        for name, value in values.items():
            assert rows.read(name, np.array(positions)).equal(value[positions])
    after = rows.read("x", np.array([8, 9, 10, 11]))
    assert after[:2].equal(values["x"][8:]) and not after[2:].any()
    found = safetensors.torch.load_file(tmp_path / outputs.shards()[0][0])
    assert found["x"].equal(values["x"][:SHARD]) and sorted(tmp_path.iterdir())[0].name.startswith("part0-")


def test_a_finished_file_is_known_by_header_size_and_content(tmp_path: Path) -> None:
    outputs, _ = written(tmp_path)
    name, _, first, stop = outputs.shards()[0]
    path = tmp_path / name
    content = path.read_bytes()
    assert finished_entry(path, outputs, stop - first) == (outputs.files or {})[name]
    assert finished_entry(path, outputs, 2) is None and finished_entry(tmp_path / "none", outputs, 4) is None
    path.write_bytes(content[:-1] + b"\0")
    assert finished_entry(path, outputs, 4) is None
    assert finished_entry(path, replace(outputs, files=None), 4) is not None
    for damaged in (content[:-1], content[:5], b"", b"\xff" * 100, content + b"1"):
        path.write_bytes(damaged)
        assert finished_entry(path, replace(outputs, files=None), 4) is None


def test_missing_and_cut_off_files_are_one_message(tmp_path: Path) -> None:
    outputs, _ = written(tmp_path)
    rows = StoredRows(tmp_path, outputs, "train", ["x"])
    paths = [tmp_path / name for name, *_ in outputs.shards()]
    paths[0].unlink()
    with pytest.raises(DataError, match=r"00000000.safetensors is missing, expected [\d,]+; run ctxlm teacher"):
        rows.check_files()
    with pytest.raises(DataError, match=r"00000000.safetensors is damaged \(.*No such file"):
        rows.read("x", np.array([1]))
    outputs, _ = written(tmp_path / "again")
    rows = StoredRows(tmp_path / "again", outputs, "train", ["x"])
    paths = [tmp_path / "again" / name for name, *_ in outputs.shards()]
    rows.read("x", np.array([4]))
    paths[1].write_bytes(paths[1].read_bytes()[:-8])
    with pytest.raises(DataError, match=r"00000001.safetensors has \d+ bytes, expected"):
        rows.check_files()
    with pytest.raises(DataError, match=r"00000001.safetensors is damaged \(it ends too early\)"):
        rows.read("x", np.array([6, 7]))

"""Files of tensors: plain safetensors, written and read without torch's or numpy's loaders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from ctxlm_ds.checkpoint.chunk_index import ChunkWriter, merge_index
from ctxlm_ds.checkpoint.manifest import hash_files, list_files
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError


@settings(max_examples=150)
@given(data=st.data())
def test_a_mutated_tensor_file_is_an_error_or_reads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    value = torch.arange(10.0)
    writer = ChunkWriter(folder, 0)
    writer.add("p", "weight", (10,), 0, value)
    merge_index(folder, [writer.write().value], {})
    path = folder / "weights-00000.safetensors"
    content = bytearray(path.read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path.write_bytes(content)
    try:
        assert CheckpointReader(folder).read_full("p").shape == (10,)
    except CheckpointError as error:
        assert "weights-00000" in str(error)


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 3)
    values = torch.arange(6, dtype=torch.float32)
    writer.add("a", "weight", (6,), 0, values[:4])
    writer.add("a", "weight", (6,), 4, values[4:])
    writer.add("a", "exp_avg", (6,), 0, -values)
    result = writer.write()
    pieces = result.value
    assert result.files == hash_files(tmp_path, list_files(tmp_path))
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["moments-00003.safetensors", "weights-00003.safetensors"]
    weights = load_file(tmp_path / "weights-00003.safetensors")
    assert {key: value.tolist() for key, value in weights.items()} == {"a": [0, 1, 2, 3], "a@4": [4, 5]}
    assert torch.equal(load_file(tmp_path / "moments-00003.safetensors")["a#exp_avg"], -values)
    with safe_open(tmp_path / "weights-00003.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert pieces["a"]["pieces"]["weight"] == [
        {"file": "weights-00003.safetensors", "key": "a", "start": 0, "length": 4},
        {"file": "weights-00003.safetensors", "key": "a@4", "start": 4, "length": 2},
    ]

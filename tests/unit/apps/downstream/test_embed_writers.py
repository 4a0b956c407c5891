"""Files of vectors: both forms read back, nothing incomplete stays, other names are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.embed import vector_writer
from ctxlm_ds.errors import ConfigError

SENTENCES = [["a", "b"], ["c"]]
VECTORS = [np.arange(12, dtype=np.float32).reshape(2, 2, 3), np.ones((1, 2, 3), dtype=np.float32)]


def write(path: Path) -> None:
    with vector_writer(path, {"layers": "all"}) as writer:
        for number, (words, vectors) in enumerate(zip(SENTENCES, VECTORS, strict=True)):
            writer.add(number, words, vectors)


def test_safetensors_read_back(tmp_path: Path) -> None:
    from safetensors import safe_open

    write(tmp_path / "v.safetensors")
    with safe_open(tmp_path / "v.safetensors", "np") as file:
        assert file.metadata() == {"layers": "all"}
        assert file.get_tensor("offsets").tolist() == [0, 2, 3]
        assert np.array_equal(file.get_tensor("vectors"), np.concatenate(VECTORS))


def test_arrow_reads_back(tmp_path: Path) -> None:
    import pyarrow as pa

    write(tmp_path / "new" / "v.arrow")
    table = pa.ipc.open_file(str(tmp_path / "new" / "v.arrow")).read_all()
    assert table.schema.metadata == {b"layers": b"all"}
    assert table["sentence"].to_pylist() == [0, 0, 1] and table["word"].to_pylist() == ["a", "b", "c"]
    for layer in range(2):
        assert table[f"layer_{layer}"].to_pylist() == np.concatenate(VECTORS)[:, layer].tolist()


def test_nothing_incomplete_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyError), vector_writer(tmp_path / "v.arrow", {}) as writer:
        writer.add(0, SENTENCES[0], VECTORS[0])
        raise KeyError
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"v\.npz: the name ends in \.safetensors or \.arrow"):
        write(tmp_path / "v.npz")

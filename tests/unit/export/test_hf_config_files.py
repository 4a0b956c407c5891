"""Weight files of a Hugging Face folder: one file or the shards of an index, and a fingerprint of all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.hf_config import INDEX_FILE, SINGLE_FILE, fingerprint, model_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, which the index names more than once and in another order."""
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_text(name)
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_each_shard_is_listed_once_and_a_single_file_alone(folder: Path) -> None:
    assert [path.name for path in model_files(folder)] == ["a.safetensors", "b.safetensors"]
    (folder / INDEX_FILE).unlink()
    (folder / SINGLE_FILE).write_text("x")
    assert model_files(folder) == [folder / SINGLE_FILE]


@pytest.mark.parametrize("name", ["config.json", "a.safetensors", "b.safetensors"])
def test_every_file_is_part_of_the_fingerprint(folder: Path, name: str) -> None:
    before = fingerprint(folder)
    assert len(before) == 64 and before == fingerprint(folder)
    (folder / name).write_text("[]")
    assert fingerprint(folder) != before


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": "c.safetensors"}, "c.safetensors is missing although model.safetensors.index.json lists it"),
        ({"x": "../a.safetensors"}, "is not in the model's folder"),
        ({"x": "/etc/passwd"}, "is not in the model's folder"),
        ({"x": ".."}, "is not in the model's folder"),
        ({"x": "a" * 300}, "is not in the model's folder"),
        ({"x": 5}, "no weight_map of file names"),
        ({}, "no weight_map of file names"),
    ],
)
def test_an_index_that_leads_nowhere(folder: Path, weight_map: dict[str, object], message: str) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ExportError, match=message):
        model_files(folder)


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="has neither model.safetensors nor"):
        model_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ExportError, match=r"a pickle \(pytorch_model\.bin\), .*save_pretrained"):
        fingerprint(tmp_path)


def test_a_config_that_cannot_be_read(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ExportError, match="config.json: cannot be read"):
        fingerprint(folder)

"""Shards are planned by size, and written with no more than a parameter or two in memory."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.safetensors_files import parse_size, plan_shards, write_model
from ctxlm_ds.families.bert.export import EXPORT
from tests.checkpoints import make_config, random_weights, write_checkpoint


def test_plan_and_sizes() -> None:
    assert plan_shards({"a": 40, "b": 400, "c": 20, "d": 20}, 60) == [["a"], ["b"], ["c", "d"]]
    assert [parse_size(text) for text in ("5GB", "1.5 MB", "4KiB", "77")] == [5 * 10**9, 1_500_000, 4096, 77]
    for text in ("GB", "5XB", "0GB", "-1GB", ""):
        with pytest.raises(ExportError, match="size"):
            parse_size(text)


class CountingReader(CheckpointReader):
    """Counts the parameters that it has read and that are still in memory."""

    now = 0
    most = 0

    def read_full(self, name: str, kind: str = "weight") -> torch.Tensor:
        value = super().read_full(name, kind)
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(value.untyped_storage(), self._forget)
        return value

    def _forget(self) -> None:
        self.now -= 1


def test_writing_holds_at_most_two_parameters(tmp_path: Path, wordpiece_folder: Path) -> None:
    """While a single file is written: never the model, never a shard."""
    config = make_config("bert", wordpiece_folder, model_settings={"num_layers": 6})
    reader = CountingReader(write_checkpoint(tmp_path / "step-00000100", config, random_weights(config)))
    key_map = EXPORT.key_map(config.model, ("predicted_logits",), 0)
    write_model(tmp_path, key_map, reader)
    assert reader.most <= 2 and reader.now == 0
    assert len(load_file(tmp_path / "model.safetensors")) == sum(len(row.theirs) for row in key_map.rows) > 100

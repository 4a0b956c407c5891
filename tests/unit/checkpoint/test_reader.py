"""The layout-free form: bounded memory, and damage is named (test_reader_shards.py: any split reads back)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.checkpoint.chunk_index import ChunkWriter, merge_index
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError

KINDS = ("weight", "exp_avg", "exp_avg_sq")
SHAPES = {"word_embeddings.weight": (7, 5), "encoder.0.mlp.up.bias": (11,), "scale": (), "one": (1, 1, 1)}


def _write(folder: Path) -> None:
    writer = ChunkWriter(folder, 0)
    for name, shape in SHAPES.items():
        for kind in KINDS:
            value = torch.ones(shape)
            writer.add(name, kind, value.shape, 0, value.reshape(-1))
    merge_index(folder, [writer.write().value], {})


def _edit_index(folder: Path, change: Any) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index["parameters"]["encoder.0.mlp.up.bias"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "index.json").unlink(), "no index.json"),
        (lambda f: (f / "index.json").write_text("{}"), "index.json: damaged"),
        (lambda f: _edit_index(f, lambda p: p["pieces"]["weight"].clear()), "elements 0..11 are in no chunk"),
        (lambda f: _edit_index(f, lambda p: p.update(shape=[12])), "elements 11..12 are in no chunk"),
        (lambda f: _edit_index(f, lambda p: p["pieces"]["weight"][0].update(file="../x")), "not in the checkpoint's"),
        (lambda f: _edit_index(f, lambda p: p["pieces"]["weight"][0].update(file="x")), "x: missing"),
        (lambda f: _edit_index(f, lambda p: p["pieces"]["weight"][0].update(key="scale")), "or listed twice"),
        (lambda f: _edit_index(f, lambda p: p["pieces"]["weight"][0].update(key="none")), "cannot read none"),
        (lambda f: os.truncate(f / "weights-00000.safetensors", 100), "weights-00000.safetensors: cannot read"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    _write(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path).read_full("encoder.0.mlp.up.bias")


def test_wrong_questions(tmp_path: Path) -> None:
    _write(tmp_path)
    reader = CheckpointReader(tmp_path)
    assert "scale" in reader and "scales" not in reader
    assert reader.kinds("scale") == ["weight", "exp_avg", "exp_avg_sq"]
    for question, message in [
        (lambda: reader.read("scales"), "no parameter 'scales'"),
        (lambda: reader.read("scale", "momentum"), "scale has no 'momentum'"),
        (lambda: reader.read("encoder.0.mlp.up.bias", start=8, length=4), "has 11 elements, 8..12 was asked for"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            question()


MEMORY_PROBE = """
import sys
from pathlib import Path
import torch
from ctxlm_ds.checkpoint.chunk_index import merge_index
from ctxlm_ds.checkpoint.chunk_index import ChunkWriter
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.chunk_index import LazyTensor
folder, elements = Path(sys.argv[1]), int(sys.argv[2])
def peak_mb():  # getrusage's figure goes on from what the process that started this one held
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
values = torch.arange(elements, dtype=torch.float32)
writer = ChunkWriter(folder, 0)
before = peak_mb()
for number in range(8):
    writer.add(f"p{number}", "weight", (elements,), 0, LazyTensor(elements, lambda number=number: values + number))
merge_index(folder, [writer.write().value], {})
written = peak_mb() - before
reader = CheckpointReader(folder)
for number in range(8):
    piece = reader.read(f"p{number}", start=elements - 1000, length=1000)
    assert piece[-1].item() == elements - 1 + number
print(written, peak_mb() - before)
"""


@pytest.mark.long
def test_memory_is_bounded_by_one_piece(tmp_path: Path) -> None:
    elements = 8 << 20
    command = [sys.executable, "-c", MEMORY_PROBE, str(tmp_path), str(elements)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written_mb, read_mb = map(float, done.stdout.split())
    one_mb = elements * 4 / 2**20
    assert math.isclose(one_mb, 32)
    # Eight pieces are 256 MB: neither writing nor reading ranges of them takes more than about two.
    assert written_mb < 2.5 * one_mb
    assert read_mb < 2.5 * one_mb

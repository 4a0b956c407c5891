"""What a resume continues and what it refuses: by the setting's name, with both values, before any data is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.checkpoint.fixed_settings import refuse_changed_data, refuse_changed_settings
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.load import dump_config
from tests.sections import changed_config

SAVED = {
    "data": {
        "train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 3}], "blend": "weighted", "split": "9,1",
        "seq_length": 128,
    }
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(dump_config(changed_config(SAVED, {})), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.seq_length": 64}, ["data.seq_length: 128 -> 64"]),
        ({"data.blend": "megatron"}, ["data.blend: 'weighted' -> 'megatron'"]),
        ({"data.split": "8,2"}, ["data.split: '9,1' -> '8,2'"]),
        ({"data.split": None}, ["data.split: '9,1' -> None"]),
        ({"data.temperature": 2.0}, ["data.temperature: 1.0 -> 2.0"]),
        (
            {"data.train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 2}]},
            ["data.train[1]: weight 3.0, epochs 1 -> weight 2.0, epochs 1"],
        ),
        (
            {"data.train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 3, "language": "fr_XX"}]},
            ["data.train[1]: weight 3.0, epochs 1 -> weight 3.0, epochs 1, language fr_XX"],
        ),
        ({"data.train": [{"path": "a", "weight": 1}]}, ["data.train: 2 sources -> 1 source"]),
        ({"data.seq_length": 64, "training.seed": 5}, ["data.seq_length: 128", "training.seed: 1234 -> 5"]),
    ],
)
def test_another_stream_of_rows_is_refused_by_name(checkpoint: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError, match="cannot be continued") as caught:
        refuse_changed_settings(checkpoint, changed_config(SAVED, changes))
    for word in words:
        assert word in str(caught.value)
    assert "initialize_from" in str(caught.value)


def test_of_a_section_only_what_differs_is_named(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        refuse_changed_settings(checkpoint, changed_config(SAVED, {"model.num_layers": 3, "objective.mask_prob": 0.3}))
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert lines == ["  model.num_layers: 12 -> 3", "  objective.mask_prob: 0.15 -> 0.3"]


def test_another_tokenizer_is_named_with_the_size_of_its_vocabulary(checkpoint: Path) -> None:
    changes = {"model.vocab_size": 999, "tokenizer.path": "other", "data.train": [{"path": "z"}]}
    with pytest.raises(CheckpointError) as caught:
        refuse_changed_settings(checkpoint, changed_config(SAVED, changes))
    lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert [line.split(":")[0] for line in lines[:3]] == ["tokenizer.path", "data.train", "model.vocab_size"]
    assert lines[0].endswith("-> other") and lines[1].endswith("-> z") and lines[2].endswith("-> 999")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training.global_batch_size": 96, "training.micro_batch_size": 4},
        {"training.max_steps": 5000},
        {"data.num_workers": 5, "data.prefetch_steps": 7},
        {"data.train": [{"path": "elsewhere/a", "weight": 1}, {"path": "b", "weight": 3, "name": "renamed"}]},
        {"data.validation": [{"name": "new", "path": "c", "part": "test"}]},
    ],
)
def test_what_leaves_the_stream_as_it_is_may_change(checkpoint: Path, changes: dict[str, Any]) -> None:
    refuse_changed_settings(checkpoint, changed_config(SAVED, changes))


def described(*indexes: str, tokenizer: str = "t", folder: str = "data") -> dict[str, Any]:
    sources = [
        {"path": f"{folder}/s{number}", "documents": [0, 90], "rows": 700 + number, "index": index * 8}
        for number, index in enumerate(indexes)
    ]
    return {"sources": sources, "tokenizer_fingerprint": tokenizer}


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (
            described("abcd", "1234"),
            ["data.train[1]: data/s1 (documents 0 to 90, 701 rows, samples efefefefefef) in the checkpoint, data/s1"],
        ),
        (described("abcd"), ["data.train[1]: data/s1", "in the checkpoint, no source now"]),
        (described("efef", "abcd"), ["data.train[0]: data/s0", "data.train[1]: data/s1"]),
        (described("abcd", "efef", "1234"), ["data.train[2]: no source in the checkpoint, data/s2"]),
        (described("abcd", "efef", tokenizer="u"), ["tokenizer_fingerprint: 't' in the checkpoint, 'u' now"]),
    ],
)
def test_other_rows_are_refused_source_by_source(tmp_path: Path, now: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError, match="cannot be continued") as caught:
        refuse_changed_data(tmp_path, described("abcd", "efef"), now)
    for word in words:
        assert word in str(caught.value)


def test_a_dataset_may_move(tmp_path: Path) -> None:
    refuse_changed_data(tmp_path, described("abcd", "efef"), described("abcd", "efef", folder="elsewhere"))

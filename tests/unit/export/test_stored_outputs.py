"""The manifest of a teacher's outputs: read, refused, compared with a recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.checkpoint.manifest import FileEntry
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.export.stored_outputs import (
    MANIFEST_NAME,
    Outputs,
    Part,
    changed_parts,
    changed_settings,
    deciding_settings,
    open_outputs,
    read_manifest,
    refuse,
    write_manifest,
)
from ctxlm_ds.recipe.schema import RunConfig

PART = Part("train", 10, [["key", [0, 5], 20, None, 2.0]])
HELD_OUT = Part("eval/wiki", 3, [["other", [0, 2], 7]])


def recipe(folder: Path | None = None, **sections: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": {"family": "distilbert"}, "objective": {"name": "distillation"},
        "data": {"sample_format": "full_sentences"}, "teacher": {"outputs": None if folder is None else str(folder)},
    }  # fmt: skip
    return RunConfig.model_validate({name: value | sections.get(name, {}) for name, value in given.items()})


def outputs(**changes: Any) -> Outputs:
    settings = deciding_settings(recipe()) | {"teacher.path": "abc", "tokenizer.path": "tok"}
    files = {"part0-00000000.safetensors": FileEntry(1, "00")}
    return replace(Outputs(settings, "BF16", {"x": [2, 3]}, 4, [PART, HELD_OUT], files), **changes)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, outputs())
    assert read_manifest(tmp_path) == outputs()
    assert outputs().row_bytes == 12
    assert [shard[1:] for shard in outputs().shards()] == [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 3)]
    assert outputs().shards()[2][0] == "part0-00000002.safetensors"


@pytest.mark.parametrize(
    "change", [{"version": 9}, {"format": "x"}, {"shard_rows": 0}, {"dtype": "I8"}, {"tensors": {"x": "wide"}},
               {"parts": []}, {"files": {"a": 3}}, {"tensors": {}}, {"more": 1}],
)  # fmt: skip
def test_a_damaged_manifest_is_one_message(tmp_path: Path, change: dict[str, Any]) -> None:
    write_manifest(tmp_path, outputs())
    path = tmp_path / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if "more" in change:
        assert read_manifest(tmp_path) == outputs()
        return
    with pytest.raises(ConfigError, match=rf"{MANIFEST_NAME} is no manifest of teacher outputs \(.*write them again"):
        read_manifest(tmp_path)


def test_a_recipe_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    with pytest.raises(ConfigError, match=r"outputs holds no teacher_outputs.json; ctxlm teacher writes"):
        open_outputs(recipe(folder))
    write_manifest(folder, outputs(files=None))
    with pytest.raises(ConfigError, match="is not complete; run ctxlm teacher again"):
        open_outputs(recipe(folder))
    write_manifest(folder, outputs())
    assert open_outputs(recipe(folder, objective={"temperature": 4.0})) == outputs()
    with pytest.raises(ConfigError, match="written for another run: objective.mask_prob 0.15 -> 0.3; set them as"):
        open_outputs(recipe(folder, objective={"mask_prob": 0.3}))
    with pytest.raises(ConfigError, match="teacher.path abc -> other"):
        open_outputs(recipe(folder, teacher={"outputs": str(folder), "fingerprint": "other"}))


def test_settings_of_the_losses_decide_nothing() -> None:
    names = deciding_settings(recipe())
    assert {"training.seed", "data.seq_length", "objective.mask_prob", "teacher.precision"} <= names.keys()
    assert not names.keys() & {"objective.temperature", "objective.cosine_weight", "training.global_batch_size"}
    assert changed_settings(outputs(), outputs().settings | {"training.seed": 9}) == ["training.seed 1234 -> 9"]


def test_other_datasets_and_more_rows_are_named() -> None:
    fewer = [replace(PART, rows=5), replace(HELD_OUT, rows=1)]
    assert changed_parts(outputs(), fewer) == changed_parts(outputs(), [PART]) == []
    assert changed_parts(outputs(), [replace(PART, rows=11)]) == ["training.max_steps (data.train) 10 rows -> 11 rows"]
    changed = replace(PART, sources=[["key", [0, 5], 20, None, 3.0]])
    assert changed_parts(outputs(), [changed]) == ["data.train (other documents, weights, epochs or rows)"]
    assert changed_parts(outputs(), [replace(HELD_OUT, name="eval/news")]) == ["data.validation news none -> 3 rows"]
    refuse(Path("x"), [])

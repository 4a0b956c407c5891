"""Run folders and Hugging Face folders of a wrong form are refused with one error, without a hang or much memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, hash_files, list_files, write_manifest
from ctxlm_ds.errors import CheckpointError, CtxlmError, ExportError
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.initial_weights import load_initial_weights
from ctxlm_ds.export.model_card import read_evaluation
from tests.checkpoints import (
    change_json,
    change_weights,
    make_config,
    outputs_of,
    random_weights,
    write_random_run,
    write_run,
)

DEEP = "[" * 50_000 + "]" * 50_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, wordpiece_folder: Path) -> Path:
    """A Hugging Face folder in several shards, and the run that it was made of next to it."""
    work = tmp_path_factory.mktemp("model")
    run = write_random_run(work / "run", "bert", wordpiece_folder)
    to_hf(run, work / "hf", max_shard_bytes=30_000)
    return work / "hf"


def set_values(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "config.json", **values)


def set_token_id(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["river"] = 4 * 10**9
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").write_text(DEEP), "config.json: cannot be read as JSON"),
        (lambda f: (f / "model.safetensors.index.json").write_text(DEEP), "index.json: cannot be read as JSON"),
        (set_values(hidden_size=10**12), "hidden_size is 1000000000000, more than"),
        (set_values(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, more than"),
        (set_values(num_hidden_layers=9999), "describes 9999 layers, but it has only"),
        (set_values(pad_token_id=10**12), "pad_token_id 1000000000000 is not one of"),
        (set_values(dtype="os.system"), "os.system"),
        (set_values(id2label=5), "do not fit bert"),
        (set_token_id, "'river' has the id 4000000000"),
        (lambda f: os.mkfifo(f / "generation_config.json"), "generation_config.json: not a regular file"),
    ],
)
def test_a_hostile_model_folder_is_refused(
    model: Path, tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(model, folder)
    change(folder)
    with pytest.raises(CtxlmError, match=message):
        from_hf(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", DEEP, "state.json: cannot be read as JSON"),
        ("index.json", '{"scalars": [], "parameters": {}}', "index.json: damaged"),
        ("index.json", '{"scalars": {"optimizer_updates": "x"}, "parameters": {}}', "optimizer_updates is 'x'"),
        ("index.json", '{"scalars": {}, "parameters": {"p": {"shape": [1e99], "pieces": 3}}}', "is not a shape"),
        ("index.json", DEEP, "index.json: cannot be read as JSON"),
        ("config.yaml", None, "config.yaml: not a regular file"),
        (MANIFEST_NAME, None, "manifest.json: cannot be read .not a regular file"),
    ],
)
def test_a_hostile_checkpoint_is_refused(
    model: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    step = tmp_path / "step-00000100"
    shutil.copytree(model.parent / "run" / "checkpoints" / step.name, step)
    if content is None:
        replace_by_fifo(step / name)
    else:
        (step / name).write_text(content)
        write_manifest(step, 100, hash_files(step, list_files(step)))
    with pytest.raises(CheckpointError, match=message):
        to_hf(step, tmp_path / "out")


def test_metrics_that_are_not_text_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff"eval/\n["eval/"]\n{"step": 1, "eval/a": 2.0}\n{"step": "x", "eval/a": 3.0}\n')
    assert read_evaluation(path, 9) == {"eval/a": 2.0}
    path.write_text('{"eval/": ' + DEEP + "}")
    assert read_evaluation(path, 9) == {}
    replace_by_fifo(path)
    assert read_evaluation(path, 9) == {}


def test_nan_weights_are_refused_by_name(tmp_path: Path, wordpiece_folder: Path) -> None:
    config = make_config("bert", wordpiece_folder)
    weights = random_weights(config)
    weights["encoder.1.mlp.up.bias"][3] = float("nan")
    run = write_run(tmp_path / "run", config, weights)
    with pytest.raises(CheckpointError, match=r"initialize_from: .*run: encoder\.1\.mlp\.up\.bias has NaN"):
        list(load_initial_weights(run, config.model, outputs_of(config), lambda name: torch.zeros(1)))


def test_an_export_says_which_positions_were_not_trained(
    tmp_path: Path, wordpiece_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for settings, longest in (({}, 32), ({"initialize_from": "runs/phase1"}, 40)):
        config = make_config("bert", wordpiece_folder, **settings)
        run = write_run(tmp_path / f"run-{longest}", config, random_weights(config))
        caplog.clear()
        to_hf(run, tmp_path / f"hf-{longest}")
        assert ("positions 32 to 40 of the exported model have random weights" in caplog.text) == (longest == 32)
        written = json.loads((tmp_path / f"hf-{longest}" / "tokenizer_config.json").read_text())
        assert written["model_max_length"] == longest


def test_a_pair_model_with_one_token_type_is_refused(tmp_path: Path, wordpiece_folder: Path) -> None:
    to_hf(write_random_run(tmp_path / "run", "bert_nsp", wordpiece_folder), tmp_path / "hf")
    set_values(type_vocab_size=1)(tmp_path / "hf")
    name = "bert.embeddings.token_type_embeddings.weight"
    change_weights(tmp_path / "hf", lambda tensors: tensors.update({name: tensors[name][:1].clone()}))
    with pytest.raises(ExportError, match="cannot be trained here: model.type_vocab_size"):
        from_hf(tmp_path / "hf", tmp_path / "ours")

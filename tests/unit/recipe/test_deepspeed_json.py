"""The settings of a DeepSpeed JSON for a run, and for transformers' Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config, deepspeed_for_trainer
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from tests.unit.recipe.test_deepspeed_rules import config_of


def test_a_refusal_shows_no_value_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_0a1b2c")
    secret: dict[str, Any] = {"x": "${MY_TOKEN}"}
    settings = {"train_batch_size": "${MY_TOKEN}", "zero_optimization": {"stage": "${MY_TOKEN}", **secret},
                "${MY_TOKEN}": 1, "flops_profiler": "${MY_TOKEN}", "scheduler": "${MY_TOKEN}",
                "optimizer": {"type": "${MY_TOKEN}", "params": secret}}  # fmt: skip
    path = tmp_path / "my.json"
    for name in settings:
        path.write_text(json.dumps({name: settings[name]}))
        with pytest.raises(ConfigError) as caught:
            build_deepspeed_config(config_of(), load_deepspeed_json(path), 1)
        assert "0a1b2c" not in str(caught.value)
    path.write_text(json.dumps(settings | {"optimizer": "auto", "scheduler": "auto"}))
    with pytest.raises(ConfigError) as caught:
        deepspeed_for_trainer(path)
    assert "0a1b2c" not in str(caught.value)


def test_each_run_swaps_to_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVME_PATH", "/mnt/fast")
    folders = set()
    for run_dir in ("runs/a", "runs/b", "runs/a"):
        built = build_deepspeed_config(config_of(run_dir=run_dir), load_deepspeed_json("infinity"), 1)
        zero = built["zero_optimization"]
        assert zero["offload_optimizer"]["nvme_path"] == zero["offload_param"]["nvme_path"]
        folders.add(zero["offload_param"]["nvme_path"])
    assert len(folders) == 2
    assert all(folder.startswith("/mnt/fast/run-") for folder in folders)


def test_a_file_for_the_trainer_gets_what_it_lacks_as_auto(tmp_path: Path) -> None:
    found = deepspeed_for_trainer("zero2")
    assert found["zero_optimization"]["stage"] == 2 and found["bf16"] == {"enabled": "auto"}
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"):
        assert found[name] == "auto"
    mine = tmp_path / "mine.json"
    mine.write_text('{"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}')
    assert deepspeed_for_trainer(mine)["gradient_clipping"] == 1.0
    mine.write_text('{"zero_optimization": {"stagee": 2, "stage": 7}}')
    with pytest.raises(ConfigError, match=r"mine\.json: 2 problems") as caught:
        deepspeed_for_trainer(mine)
    assert "did you mean zero_optimization.stage?" in str(caught.value) and "stage: 7" in str(caught.value)


def test_a_section_that_is_auto_is_the_trainers(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"optimizer": "auto", "bf16": "auto", "scheduler": "auto", "zero_optimization": null}')
    found = deepspeed_for_trainer(mine)
    assert found["bf16"] == {"enabled": "auto"} and not {"optimizer", "scheduler", "zero_optimization"} & found.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"scheduler": {"params": {"total_num_steps": 9}}}', "scheduler.params: the command sets total_num_steps"),
        ('{"optimizer": [1]}', "optimizer: expected"),
        ('{"optimizer": {"params": 3}}', "optimizer: expected"),
    ],
)
def test_a_section_that_the_trainer_would_fail_on_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        deepspeed_for_trainer(tmp_path / "mine.json")

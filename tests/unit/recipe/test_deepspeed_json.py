"""Files of DeepSpeed's settings: found by path and name, variables of the environment, damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.deepspeed import (
    DEEPSPEED_BUCKET,
    ZeroSettings,
    bucket_hints,
    build_deepspeed_config,
    deepspeed_for_trainer,
    find_deepspeed_json,
    load_deepspeed_json,
)
from tests.unit.recipe.test_deepspeed import CONFIG_DIR
from tests.unit.recipe.test_deepspeed_rules import config_of


def test_variables_of_the_environment_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps({"csv_monitor": {"output_path": "${MY_OUTPUT}/csv", "job_name": "${MY_JOB:-job}"}}))
    monkeypatch.delenv("MY_OUTPUT", raising=False)
    with pytest.raises(ConfigError, match=r"output_path is \$\{MY_OUTPUT\}/csv.*export MY_OUTPUT="):
        load_deepspeed_json(path)
    monkeypatch.setenv("MY_OUTPUT", "/data")
    assert load_deepspeed_json(path)["csv_monitor"] == {"output_path": "/data/csv", "job_name": "job"}
    built = build_deepspeed_config(config_of(), load_deepspeed_json(path), 1)
    assert {type(text) for text in built["csv_monitor"].values()} == {str}  # no class that pickle would have to name


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


def test_files_are_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"zero_optimization": {"stage": 2}}')
    assert load_deepspeed_json(mine) == {"zero_optimization": {"stage": 2}}
    monkeypatch.chdir(tmp_path)
    assert find_deepspeed_json("zero2") == CONFIG_DIR / "zero2.json"
    assert find_deepspeed_json("zero2.json") == CONFIG_DIR / "zero2.json"
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "zero2.json").write_text("{}")
    assert load_deepspeed_json("zero2") == {}
    with pytest.raises(
        ConfigError, match="zero2-ofload: no such file; did you mean zero2-offload[?] Known names: infinity"
    ):
        load_deepspeed_json("zero2-ofload")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,}', ["line 1", "not valid JSON"]),
        ("[]", ["expected an object"]),
        ('{"bf16": {"enabled": true, "enabled": false}}', ["enabled: written twice"]),
        ('{"a": ' * 3000 + "1" + "}" * 3000, ["nested deeper than 20 levels"]),
        ('{"a": ' * 30 + "1" + "}" * 30, ["nested deeper than 20 levels"]),
        ('{"gradient_clipping": NaN}', ["NaN: expected a finite number"]),
        ('{"wandb": {"group": "\\u0000"}}', ["control characters"]),
        (json.dumps({"wandb": {"group": "x" * 300_000}}), ["more than 250,000 bytes"]),
    ],
)
def test_broken_files(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_deepspeed_json(path)
    for word in (*words, str(path)):
        assert word in str(caught.value)


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


def zero(**section: Any) -> ZeroSettings:
    return ZeroSettings.of_json({"zero_optimization": section}, 1024)


def test_defaults_are_deepspeeds() -> None:
    assert ZeroSettings.of_json({}, None).stage == 0
    found = zero(stage=3)
    assert (found.overlap_comm, found.reduce_bucket, found.prefetch_bucket) == (True, DEEPSPEED_BUCKET, 50_000_000)
    assert (found.persistence_threshold, found.max_reuse_distance) == (100_000, 1_000_000_000)
    assert not zero(stage=2).overlap_comm and zero(stage=2, overlap_comm=True).overlap_comm
    assert not (found.offload_optimizer or found.offload_parameters)


def test_given_sizes_and_those_that_follow_from_the_width() -> None:
    hints = bucket_hints(1024)
    found = zero(stage=3, reduce_bucket_size="auto", stage3_prefetch_bucket_size=7)
    assert (found.reduce_bucket, found.prefetch_bucket) == (hints["reduce_bucket_size"], 7)


@pytest.mark.parametrize(("device", "offloads"), [("cpu", True), ("nvme", True), ("none", False)])
def test_offloads(device: str, offloads: bool) -> None:
    found = zero(stage=3, offload_optimizer={"device": device, "nvme_path": "/disk"}, offload_param={"device": device})
    assert (found.offload_optimizer, found.offload_parameters) == (offloads, offloads)
    assert found.nvme_paths.get("offload_optimizer") == ("/disk" if device == "nvme" else None)

"""Files of DeepSpeed's settings: found by path and name, variables of the environment, damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.json_source import find_deepspeed_json, load_deepspeed_json
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
        ('{"a": ' * 3000 + "1" + "}" * 3000, ["more than 100 levels"]),
        ('{"a": ' * 130 + "1" + "}" * 130, ["more than 100 levels"]),
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

"""Values that are no settings: each is one refusal of the recipe or of DeepSpeed's JSON, in a short time."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.run_lock import make_run_dir
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig

ROOT = Path(__file__).resolve().parents[3]


def refusal(path: Path, text: str, *overrides: str) -> str:
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a # \x00", "not valid YAML"),
        ('name: "a\\0b"', "name: 'a\\x00b': control characters"),
        ('name: "\\ud800"', "control characters and bytes that are not UTF-8"),
        ('"\\ud800": 1', "control characters"),
        ("name: \ud800", "cannot be read as UTF-8"),
        (f"name: {'x' * 300}", "too long for a file system"),
        (f"name: {'x' * 150}", "at most 100"),
        (f"data: {{train: [{'x' * 300}]}}", "too long for a file system"),
        ("model: " + "[" * 600 + "]" * 600, "nested deeper than 20 levels"),
        ("model: " + "[" * 30 + "]" * 30, "nested deeper than 20 levels"),
        (f"training: {{max_steps: {'9' * 309}}}", "expected a whole number from 1 to 1,000,000,000"),
        (f"training: {{max_steps: {'9' * 5000}}}", "a value cannot be read"),
        ("x" * 300_000, "too long for a recipe"),
    ],
)
def test_texts_that_no_recipe_has(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path / "r.yaml", text)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("line", ["a{n}: &a{n} [{above}]", "a{n}: &a{n} {{<<: [{above}]}}"])
def test_aliases_that_multiply_are_counted(tmp_path: Path, line: str) -> None:
    lines = [line.format(n=n, above=", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 12)]
    assert "more than 20,000 values" in refusal(tmp_path / "r.yaml", "\n".join(["a0: &a0 {x: 1}", *lines]))


def test_a_long_chain_of_recipes_is_refused(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    with pytest.raises(ConfigError, match="more than 20 recipes extend each other"):
        load_config(tmp_path / "0.yaml")


@pytest.mark.parametrize("size", [0, -1, 10**9])
def test_a_world_without_ranks_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="expected a number of ranks from 1 to 1,000,000"):
        check_config(RunConfig(), size)


def test_a_repeated_override_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ctxlm_ds"):
        assert load_config("bert-tiny", ["training.max_steps=100", "training.max_steps=200"]).training.max_steps == 200
    assert caplog.messages == ["note: --set training.max_steps=200 replaces --set training.max_steps=100"]


@pytest.mark.parametrize("name", ["file", "file/below", "/dev/null/x", "/proc/x"])
def test_a_run_directory_that_cannot_exist_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created: .*; set run_dir to another folder"):
        make_run_dir(tmp_path / name)


def test_sigterm_ends_a_check() -> None:
    code = (
        "import time, ctxlm_ds.pretrain as p\n"
        "p.check_only = lambda arguments: (print('ready', flush=True), time.sleep(60))\n"
        "p.main(['--config', 'bert-tiny', '--check'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        started_s = time.monotonic()
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
        assert time.monotonic() - started_s < 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "abc"}}, '"abc": expected a whole number from 1 to'),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 0}}, "0: expected a whole number from 1 to"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1e300}}, "expected a whole number from 1 to"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": None}}, "null: expected a whole number from 1 to"),
        ({"zero_optimization": {"stage": 1, "reduce_scatter": {}}}, "expected true or false"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": [1]}}, "[1]: expected true or false or null"),
        ({"zero_optimization": {"stage": 3, "offload_param": "true"}}, '"true": expected a section'),
        ({"zero_optimization": {"stage": 3, "sub_group_size": -1}}, "-1: expected a whole number from 1 to"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": 5}}}, "5: expected text"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 7}}, "a divisor of the 1 data-parallel ranks"),
        ({"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}}, "remove one"),
        (
            {
                "zero_optimization": dict.fromkeys(
                    ("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"), True
                )
            },
            "gather_16bit_weights_on_model_save is the same setting; remove one",
        ),
        ({"wandb": []}, "wandb: []: expected a section"),
        ({"wandb": {"enabled": True}}, "set logging.trackers: [wandb] in the recipe"),
        ({"aio": 5}, "aio: 5: expected a section"),
        ({"aio": {"blok_size": 5}}, "did you mean aio.block_size?"),
        ({"gradient_predivide_factor": 0}, "0: expected a number above 0"),
        ({"gradient_predivide_factor": "x"}, "expected a number above 0"),
        ({"prescale_gradients": []}, "[]: expected true or false"),
        ({"disable_python_gc": {}}, "expected true or false"),
        ({"steps_per_print": 0}, "expected a whole number from 1 to"),
        ({"communication_data_type": "fp64"}, "expected one of fp16, bf16, fp32 or null"),
        ({"log_level": "loud"}, "expected one of debug, info"),
    ],
)
def test_values_of_deepspeed_s_json_are_checked(settings: dict[str, Any], words: str) -> None:
    training = {"global_batch_size": 8, "micro_batch_size": 8, "precision": "fp32"}
    with pytest.raises(ConfigError) as caught:
        build_deepspeed_config(RunConfig.model_validate({"training": training}), settings, 1)
    (line,) = str(caught.value).splitlines()[1:]
    assert words in line


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], "optimizer.params: []: expected a section"), ({"momentum": "x"}, '"x": expected a number from 0 to 1'),
        ({"momentm": 0.9}, "SGD has no such parameter (value 0.9); did you mean momentum?"),
        ({"nesterov": 1}, "1: expected true or false"),
    ],
)  # fmt: skip
def test_parameters_of_an_optimizer_are_checked(params: Any, words: str) -> None:
    training = {"global_batch_size": 8, "micro_batch_size": 8, "precision": "fp32"}
    config = RunConfig.model_validate({"training": training, "optimizer": {"name": "from_ds_config"}})
    settings = {"optimizer": {"type": "SGD", "params": params}}
    with pytest.raises(ConfigError) as caught:
        build_deepspeed_config(config, settings, 1)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": ' * 3000 + "1" + "}" * 3000, "nested deeper than 20 levels"),
        ('{"a": ' * 30 + "1" + "}" * 30, "nested deeper than 20 levels"),
        ('{"gradient_clipping": NaN}', "NaN: expected a finite number"),
        ('{"wandb": {"group": "\\u0000"}}', "control characters"),
        (json.dumps({"wandb": {"group": "x" * 300_000}}), "more than 250,000 bytes"),
    ],
)
def test_broken_deepspeed_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_deepspeed_json(tmp_path / "x.json")
    assert words in str(caught.value)

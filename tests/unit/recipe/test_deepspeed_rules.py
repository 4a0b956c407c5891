"""Features of DeepSpeed that are refused, and the shipped list of its keys against the release and documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.deepspeed_rules import REFUSED, deepspeed_keys
from ctxlm_ds.recipe.schema import RunConfig
from tests.deepspeed_source import installed_keys
from tests.each import each


def config_of(**sections: Any) -> RunConfig:
    training = {"global_batch_size": 8, "micro_batch_size": 8, "precision": "fp32"}
    return RunConfig.model_validate({"training": training, **sections})


def refusal(user_json: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build_deepspeed_config(config_of(**sections), user_json, 1, "my.json")
    return str(caught.value)


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    value.setdefault("zero_optimization", {}).setdefault("stage", 3)
    return value


@each("path", sorted(REFUSED))
def test_a_refused_feature_names_its_key_and_reason(path: str) -> None:
    neutral, reason = REFUSED[path]
    value: Any = {"some": 1} if path in ("checkpoint", "datastates_ckpt") or "quant" in path else 7
    value = not neutral[0] if neutral and isinstance(neutral[0], bool) else value
    text = refusal(nested(path, value))
    assert f"{path}: " in text
    assert reason in text
    for same in neutral:
        if not isinstance(same, dict):
            build_deepspeed_config(config_of(), nested(path, same), 1)


@pytest.mark.parametrize("name", ["pipeline_read", "pipeline_write"])
def test_pipelined_swapping_is_for_memory_only(name: str) -> None:
    section = {"device": "nvme", "nvme_path": "/local_nvme", name: True}
    assert name in refusal({"zero_optimization": {"stage": 3, "offload_optimizer": section}})
    section["device"] = "cpu"
    build_deepspeed_config(config_of(), {"zero_optimization": {"stage": 3, "offload_optimizer": section}}, 1)


def test_the_shipped_list_is_that_of_the_installed_release() -> None:
    """A new release fails here: run `python -m tests.deepspeed_source` and look at what changed."""
    assert deepspeed_keys() == installed_keys()


PAGE = Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md"


def test_every_key_that_deepspeed_reads_is_on_the_page() -> None:
    keys = deepspeed_keys()
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    removed = {path.split(".")[-1] for path in keys["removed"]}
    expected = {*keys["top_level"], *keys["nested"]["zero_optimization"], *removed}
    assert len(expected) > 100
    assert expected - named == set()


@pytest.mark.parametrize(
    ("section", "remedy"),
    [
        ("tensorboard", "set logging.trackers: [tensorboard] in the recipe"),
        ("wandb", "set logging.trackers: [wandb] in the recipe"),
        ("csv_monitor", "read the figures from RUN/metrics.jsonl, and remove it here"),
        ("comet", "set logging.trackers in the recipe"),
    ],
)
def test_monitors_are_refused_with_what_to_use_instead(section: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_deepspeed_config(RunConfig(), {"zero_optimization": {"stage": 1}, section: {"enabled": True}}, 1)
    assert f"{section}.enabled: true" in str(refused.value) and remedy in str(refused.value)
    off = {"zero_optimization": {"stage": 1}, section: {"enabled": False}}
    assert section in build_deepspeed_config(RunConfig(), off, 1)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("compile.passes", "x", "expected a list of text"),
        ("expert_parallel.autoep_size", 10**25, "expected a whole number from 1"),
        ("expert_parallel", 5, "expected a section"),
        ("autotuning.fast", "x", "expected true or false"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_also_where_it_has_no_effect(path: str, value: Any, reason: str) -> None:
    assert f"{path}: " in (text := refusal(nested(path, value))) and reason in text


def test_an_average_of_offloaded_weights_is_refused() -> None:
    training = RunConfig().training.model_copy(update={"ema": 0.999})
    config = RunConfig().model_copy(update={"training": training})
    for stage, name in ((2, "offload_optimizer"), (3, "offload_param")):
        offloaded = {"zero_optimization": {"stage": stage, name: {"device": "cpu"}}}
        with pytest.raises(ConfigError, match="training.ema: 0.999: with offload there are no weights on the device"):
            build_deepspeed_config(config, offloaded, 1)
    build_deepspeed_config(config, {"zero_optimization": {"stage": 2}}, 1)

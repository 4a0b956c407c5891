"""Features of DeepSpeed that are refused, each by its key and its reason."""

from __future__ import annotations

from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.deepspeed_rules import REFUSED
from ctxlm_ds.recipe.schema import RunConfig
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

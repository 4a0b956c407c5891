"""The config.json and the weights of a model folder that another program may have written, checked before use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.untrusted_json import read_json_object

MAX_SIZE = 1 << 24
MAX_LAYERS = 4096
"""Largest number in a config, and under a key that counts layers, each of which transformers builds one by one."""


def read_config(folder: Path, **settings: Any) -> Any:
    """Return transformers' configuration of a local folder, with `settings` in place of those of its config.json.

    Raises ConfigError if the file is missing, damaged, has a size that no model has, names code of the Hub, or is of a
    type that transformers does not have.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no config.json; give a folder in Hugging Face's form "
                          "(ctxlm convert to-hf writes one)")  # fmt: skip
    values = read_json_object(path, ConfigError)
    for key, value in _settings(values):
        most = MAX_LAYERS if "layer" in key or "group" in key else MAX_SIZE
        if isinstance(value, int) and value > most:
            raise ConfigError(f"{path}: {key} is more than {most:,}; correct the file")
        if key.endswith("_implementation") and "/" in str(value):
            raise ConfigError(f"{path}: {key} {str(value)[:60]!r} is code of the Hub, which is never run; remove it")
    kind = str(values.get("model_type"))[:60]
    if kind not in CONFIG_MAPPING:
        code = "; code of the model's own (auto_map) is never run" if "auto_map" in values else ""
        raise ConfigError(f"{path}: transformers has no model of type {kind!r}{code}")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **settings)
    except Exception as error:  # values of wrong types raise any exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path}: transformers cannot read it: {reason}") from error


def _settings(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield key, value
        if isinstance(value, dict):
            yield from _settings(value)


def check_weights(folder: Path, model: torch.nn.Module) -> None:
    """Raise ConfigError if a weight of the model is not finite."""
    for name, value in model.named_parameters():
        if not value.isfinite().all():
            raise ConfigError(f"{folder}: {name} has NaN or infinite values; the model is damaged, take an earlier one")

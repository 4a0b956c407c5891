"""Settings that the installed DeepSpeed reads, for comparison with the shipped list.

The keys are those that `DeepSpeedConfig` asks a recording dictionary for, and the fields of its pydantic models, which
also give types and ranges; parameters of optimizers come from their signatures. `python -m tests.deepspeed_source`
writes the list for a new release.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_origin

from ctxlm_ds.recipe.deepspeed_rules import KEYS_FILE, KeyPath
from ctxlm_ds.training.optimizers.from_ds_config import ELEMENTWISE

READ_ELSEWHERE = frozenset({"data_parallel_size", "sequence_parallel_size", "allgather_size"})
"""Read by deepspeed.initialize before it makes its config, next to a process group, and with stage 0."""
MONITORS = ("comet", "csv_monitor", "tensorboard", "wandb")
"""Sections whose keys are in deepspeed_rules.json."""
CLOSED_SECTIONS = (
    "optimizer",
    "scheduler",
    "flops_profiler",
    "activation_checkpointing",
    "data_types",
    "torch_autocast",
    "timers",
)
"""Sections that DeepSpeed reads key by key without refusing others."""


def installed_keys() -> dict[str, Any]:
    """Read the keys, values and optimizers of the installed DeepSpeed, as deepspeed_keys.json has them."""
    from deepspeed.runtime import config

    reads, models = keys_read(), installed_models()
    nested: dict[KeyPath, frozenset[str]] = {
        (name,): frozenset(path[1] for path in reads if path[0] == name and path[1:]) for name in CLOSED_SECTIONS
    }
    for path, model in models.items():
        if path not in MONITORS:
            nested |= nested_keys(tuple(path.split(".")), model)
    nested["bfloat16",] = nested["bf16",]
    removed: dict[KeyPath, str] = {
        (*section, key): " ".join(text.split())
        for section, texts in (((), config._REMOVED_TOP_LEVEL_CONFIG_KEYS),
                               (("zero_optimization",), config._REMOVED_ZERO_CONFIG_KEYS))
        for key, text in texts.items()
    }  # fmt: skip
    top_level = {path[0] for path in reads} - {path[0] for path in removed if len(path) == 1}
    values = dict(sorted(value for path, model in models.items() for value in _model_values(path, model)))
    return {
        "deepspeed": version("deepspeed"),
        "top_level": sorted(top_level | READ_ELSEWHERE),
        "nested": {".".join(path): sorted(names) for path, names in sorted(nested.items())},
        "removed": {".".join(path): text for path, text in sorted(removed.items())},
        "values": values,
        "optimizers": installed_optimizers(),
    }


def installed_models() -> dict[str, Any]:
    """Return DeepSpeed's pydantic models by the path of their section."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "bf16": DeepSpeedBF16Config, "comet": CometConfig, "comms_logger": CommsLoggerConfig, "compile": CompileConfig,
        "csv_monitor": CSVConfig, "fp16": DeepSpeedFP16Config, "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig, "tensorboard": TensorBoardConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig, "wandb": WandbConfig,
        "weight_quantization": WeightQuantConfig, "zero_optimization": DeepSpeedZeroConfig,
    }  # fmt: skip


def _model_values(path: str, model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in model.model_fields.items():
        types = [one for one in get_args(field.annotation) or (field.annotation,) if one is not type(None)]
        kind = field.annotation if get_origin(field.annotation) is list else types[0]
        inner = getattr(kind, "model_fields", None)
        rule: dict[str, Any] = {"null": True} if len(types) < len(get_args(field.annotation)) else {}
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            rule["values"] = list(dict.fromkeys(item.value for item in kind))
        elif isinstance(kind, str):
            rule["values"] = types
        elif kind in (bool, int, float, str, list, Path):
            rule["type"] = "str" if kind is Path else kind.__name__
        elif inner is None:
            continue
        for item in field.metadata:
            rule |= {bound: getattr(item, bound) for bound in ("gt", "ge", "lt", "le") if hasattr(item, bound)}
        for own in filter(None, (name, field.alias)):
            yield from _model_values(f"{path}.{own}", kind) if inner else [(f"{path}.{own}", rule)]


def installed_optimizers() -> dict[str, list[str]]:
    """Read the parameters of torch's and DeepSpeed's optimizers."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    def names(*classes: type) -> list[str]:
        found = [list(inspect.signature(one).parameters)[1:] for one in classes]
        return [name for name in found[0] if all(name in other for other in found)]

    torch_names = {kind: names(getattr(torch.optim, kind)) for kind in ELEMENTWISE if kind != "Lion"}
    adam = [name for name in names(FusedAdam, DeepSpeedCPUAdam) if name != "amsgrad"]
    return torch_names | {
        "Lion": names(FusedLion, DeepSpeedCPULion),
        "adam": [*adam, "adam_w_mode", "fp32_optimizer_states", "torch_adam"],
        "torch_adam": [*torch_names["AdamW"], "adam_w_mode", "torch_adam"],
    }


class Recording(dict[str, Any]):
    """A section of a configuration that notes the path of every key that is read."""

    def __init__(self, reads: set[KeyPath], path: KeyPath, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._reads, self._path = reads, path

    def _note(self, key: str) -> str:
        self._reads.add((*self._path, key))
        return key

    def __copy__(self) -> Recording:
        return self

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(self._note(key), default)

    def pop(self, key: str, *default: Any) -> Any:
        return super().pop(self._note(key), *default)

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(self._note(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._note(str(key)))

    def keys(self) -> Any:
        return self


def keys_read() -> set[KeyPath]:
    """Return the paths that DeepSpeed reads of a configuration that has every closed section."""
    from deepspeed import DeepSpeedConfig

    reads: set[KeyPath] = set()
    typed = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}}
    sections = {name: Recording(reads, (name,), typed.get(name, {})) for name in CLOSED_SECTIONS}
    DeepSpeedConfig(Recording(reads, (), {"train_micro_batch_size_per_gpu": 1, **sections}))
    return reads


def nested_keys(path: KeyPath, model: Any) -> dict[KeyPath, frozenset[str]]:
    """Return names and aliases of a pydantic model's fields by its path, and those of the models that it holds."""
    found: dict[KeyPath, frozenset[str]] = {}
    names: set[str] = set()
    for name, field in model.model_fields.items():
        own = {name, field.alias or name}
        names |= own
        for kind in get_args(field.annotation) or (field.annotation,):
            for key in own if hasattr(kind, "model_fields") else ():
                found |= nested_keys((*path, key), kind)
    return found | {path: frozenset(names)}


def write() -> None:
    """Write the shipped list from the installed DeepSpeed."""
    # One line per rule.
    indented = json.dumps(installed_keys(), indent=1)
    text = re.sub(r"\{\s+([^{}\[\]]*?)\s+\}", lambda match: f"{{{' '.join(match[1].split())}}}", indented)
    KEYS_FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()

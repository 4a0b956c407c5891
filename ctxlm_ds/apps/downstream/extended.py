"""transformers' classes with further modules of a task, whose weights are read and saved with the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.errors import ConfigError


def concrete_class(auto_class: Any, config: Any) -> Any:
    """Return the class that an auto class takes for a configuration."""
    found = auto_class._model_mapping[type(config)]
    return found[0] if isinstance(found, (list, tuple)) else found


def load_extended(extended: Any, folder: Path, config: Any, random: bool) -> Any:
    """Return a model of an extended class in fp32; modules that the folder does not have are drawn by the seed."""
    # Its weights can be read by the class that it extends, which ignores the further ones.
    extended.__name__ = extended.__qualname__ = extended.__mro__[1].__name__
    if random:
        return extended._from_config(config, dtype=torch.float32)
    return read_model(extended, folder, config)


def read_model(made: Any, folder: Path, config: Any) -> Any:
    """Return a model of a folder's weights (safetensors only) in fp32.

    Raises:
        ConfigError: weights of the folder have other sizes.
    """
    options = {"dtype": torch.float32, "use_safetensors": True, "local_files_only": True}
    try:
        return made.from_pretrained(folder, config=config, **options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ConfigError(f"--model {folder}: weights of other sizes than the task needs; a model fine-tuned on a task "
                          "with other labels cannot be its start, give the pretrained one") from None  # fmt: skip

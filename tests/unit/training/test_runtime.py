"""An allocator's error becomes one message with the size of the model."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.training.runtime import explain_out_of_memory


def test_memory_that_cannot_be_had_is_explained() -> None:
    config = load_config("bert-base", ["model.vocab_size=30522"])
    message = r"memory ran out\. The model has 110,106,428 parameters; .* about 2 GB"
    with pytest.raises(ConfigError, match=message), explain_out_of_memory(config):
        torch.empty(2**55)
    with pytest.raises(ConfigError, match=message), explain_out_of_memory(config):
        raise MemoryError


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory(load_config("bert-tiny")):
        raise RuntimeError("something else")

"""Models are read from safetensors only, and probabilities sum to 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ctxlm_ds.apps.downstream.fit import load_config
from ctxlm_ds.apps.downstream.kinds.base import softmax
from ctxlm_ds.apps.downstream.kinds.sequence import Classification
from ctxlm_ds.apps.downstream.prepare import Parts, make_kind
from tests.downstream_models import sentiment, write_bert


def make(folder: Path) -> Classification:
    task, examples = sentiment(4)
    return make_kind(task, folder, Parts(examples, examples, None, ["bad", "good"]))  # type: ignore[return-value]


def test_a_pickled_model_is_not_read(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    kind = make(folder)
    config = load_config(folder, kind)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        kind.model(folder, config, random=False)
    assert kind.model(folder, config, random=True).config.model_type == "bert"


def test_16_bit_weights_are_widened(tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    folder = write_bert(tmp_path)
    AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    kind = make(folder)
    for random in (False, True):
        model = kind.model(folder, load_config(folder, kind), random)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_probabilities_of_large_logits() -> None:
    found = softmax(np.array([[1000.0, 1000.0], [-1000.0, 0.0]], dtype=np.float32))
    assert np.allclose(found, [[0.5, 0.5], [0.0, 1.0]])

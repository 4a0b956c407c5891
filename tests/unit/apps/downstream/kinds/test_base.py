"""Models are read from safetensors only, and probabilities sum to 1.

Further modules of a task: drawn by the seed or read from a folder, ignored by the class that is extended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ctxlm_ds.apps.downstream.fit import load_config
from ctxlm_ds.apps.downstream.kinds.base import softmax
from ctxlm_ds.apps.downstream.kinds.sequence import Classification
from ctxlm_ds.apps.downstream.kinds.tagging import Tagging
from ctxlm_ds.apps.downstream.prepare import Parts, make_kind
from ctxlm_ds.errors import ConfigError
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


class WithFurther(Tagging):
    """A kind whose models have a further module."""

    def extend(self, base: Any) -> Any:
        class Extended(base):  # type: ignore[misc]
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                self.further = nn.Linear(config.hidden_size, 3)
                self.post_init()

        return Extended


def test_further_modules_are_drawn_saved_and_read(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForTokenClassification

    folder = write_bert(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    kind = WithFurther(sentiment(0)[0], None, [], 32)
    models = []
    for seed, random in ((1, False), (1, False), (2, False), (3, True)):
        torch.manual_seed(seed)
        models.append(kind.model(folder, config, random))
    weights = [model.further.weight.detach() for model in models]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert 0.01 < weights[0].std() < 0.03  # as the model draws its own
    words = [model.bert.embeddings.word_embeddings.weight for model in models]
    assert torch.equal(words[0], words[2]) and not torch.equal(words[0], words[3])
    models[0].bfloat16().save_pretrained(tmp_path / "saved")
    again = kind.model(tmp_path / "saved", AutoConfig.from_pretrained(tmp_path / "saved"), False)
    assert torch.equal(again.further.weight, models[0].further.weight.float())
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    assert plain.config.architectures == [type(plain).__name__] == ["BertForTokenClassification"]
    config = AutoConfig.from_pretrained(tmp_path / "saved", num_labels=5)
    with pytest.raises(ConfigError, match="weights of other sizes than the task needs"):
        kind.model(tmp_path / "saved", config, False)

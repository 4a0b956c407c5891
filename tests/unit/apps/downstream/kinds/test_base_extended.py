"""Further modules of a task: drawn by the seed or read from a folder, ignored by the class that is extended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ctxlm_ds.apps.downstream.kinds.base import concrete_class, load_extended
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import write_bert


def extended() -> Any:
    from transformers import BertForTokenClassification

    class Extended(BertForTokenClassification):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.further = nn.Linear(config.hidden_size, 3)
            self.post_init()

    return Extended


def test_further_modules_are_drawn_saved_and_read(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForTokenClassification

    folder = write_bert(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    base = concrete_class(AutoModelForTokenClassification, config)
    models = []
    for seed, random in ((1, False), (1, False), (2, False), (3, True)):
        torch.manual_seed(seed)
        models.append(load_extended(extended(), folder, config, random))
    weights = [model.further.weight.detach() for model in models]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert 0.01 < weights[0].std() < 0.03  # as the model draws its own
    words = [model.bert.embeddings.word_embeddings.weight for model in models]
    assert torch.equal(words[0], words[2]) and not torch.equal(words[0], words[3])
    models[0].bfloat16().save_pretrained(tmp_path / "saved")
    again = load_extended(extended(), tmp_path / "saved", AutoConfig.from_pretrained(tmp_path / "saved"), False)
    assert torch.equal(again.further.weight, models[0].further.weight.float())
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    assert type(plain) is base and plain.config.architectures == [base.__name__]
    config = AutoConfig.from_pretrained(tmp_path / "saved", num_labels=5)
    with pytest.raises(ConfigError, match="weights of other sizes than the task needs"):
        load_extended(extended(), tmp_path / "saved", config, False)

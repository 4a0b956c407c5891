"""Weights of a smaller model from some of the layers of a larger one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.export.initial_weights import load_initial_weights, spread
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, outputs_of, write_random_run
from tests.unit.export.test_initial_weights import fresh_values


def test_equal_steps_over_the_layers_are_those_of_distilbert() -> None:
    assert spread(12, 6) == [0, 2, 4, 7, 9, 11]
    assert (spread(24, 12)[0], spread(24, 12)[-1], spread(4, 4), spread(5, 1)) == (0, 23, [0, 1, 2, 3], [0])


@pytest.mark.parametrize(("layers", "wanted"), [("spread", [0, 3, 5]), ([5, 0, 1], [5, 0, 1])])
def test_a_student_starts_from_layers_of_its_teacher(
    tmp_path: Path, wordpiece_folder: Path, layers: list[int] | str, wanted: list[int]
) -> None:
    size = load_tokenizer(wordpiece_folder).vocab_size
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=size, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=40,
    )  # fmt: skip
    teacher = transformers.BertForPreTraining(config)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter))
    teacher.save_pretrained(tmp_path / "teacher")
    student = make_config("distilbert", wordpiece_folder, size, {"num_layers": 3, "layer_norm_eps": 1e-12})
    outputs, fresh = outputs_of(student), fresh_values(student)
    loaded = dict(load_initial_weights(tmp_path / "teacher", student.model, outputs, fresh.__getitem__, layers))
    theirs = teacher.state_dict()
    for here, there in enumerate(wanted):
        value = theirs[f"bert.encoder.layer.{there}.output.dense.weight"]
        assert loaded[f"encoder.{here}.mlp.down.weight"].equal(value)
    assert loaded["embeddings.layer_norm.bias"].equal(theirs["bert.embeddings.LayerNorm.bias"])
    assert loaded["heads.mlm_transform.weight"].equal(theirs["cls.predictions.transform.dense.weight"])
    assert loaded["mlm_bias.bias"].equal(theirs["cls.predictions.bias"]) and loaded.keys() == fresh.keys()


@pytest.mark.parametrize(
    ("layers", "message"),
    [([0, 1, 2], "has 3 layers, but the model has 2"), ([0, 2], "2 is not one of the source's layers 0 to 1")],
)
def test_numbers_of_layers_that_do_not_fit_are_refused(
    tmp_path: Path, wordpiece_folder: Path, layers: list[int], message: str
) -> None:
    config = make_config("bert_nsp", wordpiece_folder)
    run = write_random_run(tmp_path / "run", "bert_nsp", wordpiece_folder)
    with pytest.raises(CheckpointError, match=message):
        load_initial_weights(run, config.model, outputs_of(config), lambda name: torch.empty(0), layers)

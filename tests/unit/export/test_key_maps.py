"""Names of the tensors in a folder are found in the tables, and models without a plain class are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import export_of
from ctxlm_ds.export.key_maps import KeyMap, assign
from ctxlm_ds.families.bert.config import BertSection
from ctxlm_ds.families.gpt.config import Gpt1Section
from ctxlm_ds.families.roberta.config import RobertaSection
from ctxlm_ds.recipe.sections import ModelSection
from tests.checkpoints import make_config, outputs_of

MASKED_LM, SENTENCES, CAUSAL = ("predicted_logits",), ("predicted_logits", "sentence_logits"), ("logits",)
PAD_ID = {"bert_nsp": 0, "bert": 0, "roberta": 1, "gpt2": 0, "gpt1": 0}
HIDDEN = 32


def key_map_of(kind: str) -> KeyMap:
    config = make_config(kind, Path("none"), 60)
    return export_of(config.model.family).key_map(config.model, outputs_of(config), PAD_ID[kind])


def names_of(key_map: KeyMap) -> list[str]:
    """Names of the parameters of the class, both names of tied ones."""
    return [name for row in key_map.rows for name in row.theirs] + list(key_map.tied)


def test_a_tied_tensor_may_stand_under_its_second_name_only() -> None:
    key_map = key_map_of("roberta")
    unused = ("roberta.embeddings.position_ids", "roberta.pooler.dense.weight")
    names = [name for name in names_of(key_map) if name != "lm_head.bias"]
    found = assign(key_map, [*names, *unused], "folder")
    assert found.stored["lm_head.bias"] == "lm_head.decoder.bias"
    assert found.unused == unused


def test_missing_and_unknown_tensors_are_all_named() -> None:
    key_map = key_map_of("bert")
    left_out = ("layer.1.output.dense", "transform.dense.bias")
    names = [name for name in names_of(key_map) if not any(part in name for part in left_out)]
    with pytest.raises(ExportError) as error:
        assign(key_map, [*names, "classifier.weight"], "folder")
    message = str(error.value)
    for name in ("bert.encoder.layer.1.output.dense.weight", "bert.encoder.layer.1.output.dense.bias",
                 "cls.predictions.transform.dense.bias", "classifier.weight", "BertForMaskedLM"):  # fmt: skip
        assert name in message


@pytest.mark.parametrize(
    ("model", "outputs", "reason"),
    [
        (BertSection(pre_layer_norm=True), MASKED_LM, "pre_layer_norm"),
        (RobertaSection(pre_layer_norm=True), MASKED_LM, "pre_layer_norm"),
        (RobertaSection(), SENTENCES, "no class of transformers computes these"),
        (RobertaSection(hidden_activation="relu"), MASKED_LM, "hidden_activation"),
        (Gpt1Section(), CAUSAL, "hidden_activation is gelu: .* train with .* gelu_tanh"),
        (Gpt1Section(hidden_activation="relu", intermediate_size=9), CAUSAL, "hidden_size, 3072"),
        (BertSection(), ("sentence_logits",), "no class of transformers computes these"),
    ],
)
def test_models_without_a_plain_class_are_refused_with_the_reason(
    model: ModelSection, outputs: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ExportError, match=reason):
        export_of(model.family).key_map(model, outputs, 1)

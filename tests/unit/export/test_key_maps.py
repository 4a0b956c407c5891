"""The tables name every parameter of both sides exactly once, and their values go there and back unchanged."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import export_of
from ctxlm_ds.export.key_maps import KeyMap, assign
from ctxlm_ds.families.bert.config import BertSection
from ctxlm_ds.families.gpt.config import Gpt1Section
from ctxlm_ds.families.roberta.config import RobertaSection
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.recipe.sections import ModelSection
from tests.checkpoints import make_config, outputs_of

MASKED_LM, SENTENCES, CAUSAL = ("predicted_logits",), ("predicted_logits", "sentence_logits"), ("logits",)
KINDS = ["bert_nsp", "bert", "roberta", "gpt2", "gpt1"]
PAD_ID = {"bert_nsp": 0, "bert": 0, "roberta": 1, "gpt2": 0, "gpt1": 0}
HIDDEN = 32


def hf_model(kind: str) -> torch.nn.Module:
    common = {"vocab_size": 60, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 48}  # fmt: skip
    if kind in ("gpt2", "gpt1"):
        sizes = {"vocab_size": 60, "n_positions": 40, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4}
        if kind == "gpt2":
            return GPT2LMHeadModel(GPT2Config(**sizes))
        return OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes))
    if kind == "roberta":
        return RobertaForMaskedLM(RobertaConfig(max_position_embeddings=42, type_vocab_size=1, **common))
    return (BertForPreTraining if kind == "bert_nsp" else BertForMaskedLM)(
        BertConfig(max_position_embeddings=40, **common)
    )


def key_map_and_shapes(kind: str) -> tuple[KeyMap, dict[str, tuple[int, ...]]]:
    config = make_config(kind, Path("none"), 60)
    model, outputs = config.model, outputs_of(config)
    return export_of(model.family).key_map(model, outputs, PAD_ID[kind]), plain_program(model, outputs).shapes


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_of_ours_is_in_exactly_one_row(kind: str) -> None:
    key_map, shapes = key_map_and_shapes(kind)
    assert Counter(row.ours for row in key_map.rows) == Counter(shapes.keys())


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_the_hugging_face_class_is_in_exactly_one_row_or_tied(kind: str) -> None:
    key_map, shapes = key_map_and_shapes(kind)
    theirs = Counter(name for row in key_map.rows for name in row.theirs)
    module = hf_model(kind)
    assert type(module).__name__ == key_map.hf_class
    state = module.state_dict()
    assert theirs + Counter(key_map.tied.keys()) == Counter(state.keys())
    for row in key_map.rows:
        assert [tuple(state[name].shape) for name in row.theirs] == row.their_shapes(shapes[row.ours])
    for alias, name in key_map.tied.items():
        assert state[alias].data_ptr() == state[name].data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_values_go_there_and_back_bitwise(kind: str) -> None:
    key_map, shapes = key_map_and_shapes(kind)
    for row in key_map.rows:
        value = torch.randn(shapes[row.ours])
        value.view(-1)[0] = -0.0
        theirs = row.to_theirs(value)
        assert [tuple(part.shape) for part in theirs] == row.their_shapes(tuple(value.shape))
        stored = dict(zip(row.theirs, theirs, strict=True))
        back = row.to_ours(stored.__getitem__)
        assert torch.equal(back.view(torch.int32), value.view(torch.int32)), row.ours
        assert row.our_shape(lambda name, stored=stored: tuple(stored[name].shape)) == tuple(value.shape)


def test_fused_rows_are_query_then_key_then_value() -> None:
    key_map, _ = key_map_and_shapes("bert")
    row = next(row for row in key_map.rows if row.ours == "encoder.1.attention.qkv.weight")
    assert [name.split(".")[-2] for name in row.theirs] == ["query", "key", "value"]
    fused = torch.arange(3.0 * HIDDEN).repeat_interleave(HIDDEN).view(3 * HIDDEN, HIDDEN)
    query, key, value = row.to_theirs(fused)
    assert (query[0, 0], key[0, 0], value[0, 0]) == (0.0, HIDDEN, 2 * HIDDEN)


@pytest.mark.parametrize("kind", ["gpt2", "gpt1"])
def test_gpt_matrices_are_transposed_with_query_key_and_value_as_columns(kind: str) -> None:
    key_map, _ = key_map_and_shapes(kind)
    row = next(row for row in key_map.rows if row.ours == "decoder.1.attention.qkv.weight")
    fused = torch.arange(3.0 * HIDDEN).repeat_interleave(HIDDEN).view(3 * HIDDEN, HIDDEN)
    (columns,) = row.to_theirs(fused)
    assert row.theirs == ("transformer.h.1.attn.c_attn.weight",) and columns.shape == (HIDDEN, 3 * HIDDEN)
    assert columns[0].tolist() == list(range(3 * HIDDEN))


@pytest.mark.parametrize("kind", ["gpt2", "gpt1"])
def test_gpt_files_of_the_bare_model_have_no_prefix_and_hold_buffers(kind: str) -> None:
    """As openai-community/gpt2's: `h.0.attn.bias` is the triangular mask."""
    key_map, _ = key_map_and_shapes(kind)
    state = [name for name in hf_model(kind).state_dict() if name != "lm_head.weight"]
    bare = [name.removeprefix("transformer.") for name in state]
    buffers = ["h.0.attn.bias", "h.1.attn.masked_bias"]
    found = assign(key_map, [*bare, *buffers, "lm_head.weight"], "folder")
    assert found.stored == dict(zip(state, bare, strict=True))
    assert found.unused == tuple(buffers)
    assert list(found.doubles) == ["lm_head.weight"]
    assert assign(key_map, state, "folder").stored == {name: name for name in state}


def test_roberta_token_types_are_zeros_going_out_and_added_to_positions_coming_in() -> None:
    key_map, shapes = key_map_and_shapes("roberta")
    row = next(row for row in key_map.rows if "position" in row.ours)
    table = torch.randn(shapes[row.ours])
    positions, token_types = row.to_theirs(table)
    assert positions.equal(table) and token_types.shape == (1, HIDDEN) and not token_types.any()
    addend = torch.randn(1, HIDDEN)
    assert row.change.to_ours([positions, addend]).equal(table + addend)


@pytest.mark.parametrize("pad_id", [0, 1, 3])
def test_roberta_positions_begin_after_the_padding_id(pad_id: int) -> None:
    key_map = export_of("roberta").key_map(RobertaSection(vocab_size=60, num_layers=1), MASKED_LM, pad_id)
    row = next(row for row in key_map.rows if "position" in row.ours)
    table = torch.randn(42, HIDDEN)
    positions, _ = row.to_theirs(table)
    assert positions.shape[0] == 40 + pad_id + 1
    assert positions[pad_id + 1 :].equal(table[2:])
    assert row.change.to_ours([positions, torch.zeros(1, HIDDEN)])[2:].equal(table[2:])


def hub_names(kind: str) -> list[str]:
    """Names as in the files of bert-base-uncased and roberta-base, with buffers and both names of tied tensors."""
    names = list(hf_model(kind).state_dict())
    prefix = "roberta" if kind == "roberta" else "bert"
    return [*names, f"{prefix}.embeddings.position_ids"]


def test_legacy_names_buffers_and_second_names_are_recognised() -> None:
    key_map, _ = key_map_and_shapes("bert_nsp")
    legacy = [
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for name in hub_names("bert_nsp")
    ]
    found = assign(key_map, legacy, "folder")
    assert found.unused == ("bert.embeddings.position_ids",)
    assert found.stored["bert.embeddings.LayerNorm.weight"] == "bert.embeddings.LayerNorm.gamma"
    assert found.doubles == {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    assert set(found.stored.values()) | set(found.doubles) | set(found.unused) == set(legacy)


def test_a_tied_tensor_may_stand_under_its_second_name_only() -> None:
    key_map, _ = key_map_and_shapes("roberta")
    names = [name for name in hub_names("roberta") if name != "lm_head.bias"] + ["roberta.pooler.dense.weight"]
    found = assign(key_map, names, "folder")
    assert found.stored["lm_head.bias"] == "lm_head.decoder.bias"
    assert found.unused == ("roberta.embeddings.position_ids", "roberta.pooler.dense.weight")


def test_missing_and_unknown_tensors_are_all_named() -> None:
    key_map, _ = key_map_and_shapes("bert")
    left_out = ("layer.1.output.dense", "transform.dense.bias")
    names = [name for name in hub_names("bert") if not any(part in name for part in left_out)]
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
        (RobertaSection(), SENTENCES, "next-sentence"),
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

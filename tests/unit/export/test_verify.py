"""The comparison of logits holds for a right export and fails for each way in which one can be subtly wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CtxlmError, ExportError
from ctxlm_ds.export import verify
from ctxlm_ds.export.huggingface import to_hf
from ctxlm_ds.export.verify import Comparison, build_inputs, verify_folder
from ctxlm_ds.families.bert.export import EXPORT
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import change_json, change_weights, make_config, outputs_of, random_weights, write_checkpoint


class Exported:
    """A checkpoint and its export, to be verified again after a change."""

    def __init__(self, folder: Path, kind: str, tokenizer: Path) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self.config: RunConfig = make_config(kind, tokenizer)
        self.checkpoint = write_checkpoint(folder / "step-00000100", self.config, random_weights(self.config))
        self.folder = folder / "hf"
        to_hf(self.checkpoint, self.folder)

    def verify(self) -> list[Comparison]:
        reader, outputs = CheckpointReader(self.checkpoint), outputs_of(self.config)
        return verify_folder(self.folder, reader, self.config.model, outputs, self.tokenizer)

    def change_weights(self, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        change_weights(self.folder, change)


@pytest.fixture
def bert(tmp_path: Path, wordpiece_folder: Path) -> Exported:
    return Exported(tmp_path, "bert_nsp", wordpiece_folder)


@pytest.fixture
def roberta(tmp_path: Path, byte_bpe_folder: Path) -> Exported:
    return Exported(tmp_path, "roberta", byte_bpe_folder)


def test_a_right_export_holds_on_random_longest_and_real_text(bert: Exported) -> None:
    comparisons = bert.verify()
    assert [c.name for c in comparisons] == [
        f"{name}/{output}"
        for name in ("random", "longest", "text")
        for output in ("predicted_logits", "sentence_logits")
    ]
    assert all(c.relative <= 1e-5 and c.logit_scale > 0.1 for c in comparisons)


def swap(first: str, second: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def shift(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].roll(1, 0).contiguous()

    return change


ATTENTION = "bert.encoder.layer.0.attention.self"


@pytest.mark.parametrize(
    "change",
    [
        swap(f"{ATTENTION}.query.weight", f"{ATTENTION}.key.weight"),
        swap("bert.encoder.layer.0.attention.output.LayerNorm.weight", "bert.encoder.layer.0.output.LayerNorm.weight"),
        swap("cls.predictions.transform.LayerNorm.bias", "cls.predictions.transform.dense.bias"),
        shift("bert.embeddings.position_embeddings.weight"),
        shift("bert.embeddings.token_type_embeddings.weight"),
        shift("cls.predictions.bias"),
        shift("cls.seq_relationship.weight"),
    ],
)
def test_a_tensor_in_the_wrong_place_fails(bert: Exported, change: Callable) -> None:
    bert.change_weights(change)
    with pytest.raises(ExportError, match="differ"):
        bert.verify()


def test_positions_off_by_one_fail_for_roberta(roberta: Exported) -> None:
    roberta.verify()
    roberta.change_weights(shift("roberta.embeddings.position_embeddings.weight"))
    with pytest.raises(ExportError, match="differ"):
        roberta.verify()


@pytest.mark.parametrize("values", [{"hidden_act": "gelu_pytorch_tanh"}, {"layer_norm_eps": 1e-2},
                                    {"num_attention_heads": 2}])  # fmt: skip
def test_a_wrong_setting_of_the_same_shapes_fails(bert: Exported, values: dict) -> None:
    change_json(bert.folder / "config.json", **values)
    with pytest.raises(ExportError, match="differ"):
        bert.verify()


def test_a_missing_tensor_and_a_nan_fail(bert: Exported) -> None:
    bert.change_weights(lambda tensors: tensors["bert.embeddings.LayerNorm.weight"].fill_(math.nan))
    with pytest.raises(ExportError, match="differ"):
        bert.verify()
    bert.change_weights(lambda tensors: tensors.pop("bert.pooler.dense.bias"))
    with pytest.raises(ExportError, match="bert.pooler.dense.bias"):
        bert.verify()


def test_another_tokenizer_fails(bert: Exported) -> None:
    path = bert.folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["the"], vocab["was"] = vocab["was"], vocab["the"]
    path.write_text(json.dumps(content))
    (bert.folder / "vocab.txt").write_text("\n".join(sorted(vocab, key=lambda token: vocab[token])) + "\n")
    with pytest.raises(CtxlmError, match="tokenizer gives"):
        bert.verify()


def test_rows_of_a_long_model_are_cut(
    bert: Exported, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verify, "MOST_POSITIONS", 30)
    with caplog.at_level("INFO"):
        inputs = build_inputs(bert.folder, EXPORT, bert.config.model, bert.tokenizer)
    assert inputs["longest"]["position_ids"].tolist() == [list(range(30))]
    assert "comparing rows of 30 positions, of the 40 that the model reads" in caplog.text


def test_the_inputs_use_padding_both_token_types_and_every_position(bert: Exported) -> None:
    inputs = build_inputs(bert.folder, EXPORT, bert.config.model, bert.tokenizer)
    random, longest, text = inputs["random"], inputs["longest"], inputs["text"]
    assert longest["position_ids"].tolist() == [list(range(40))]
    assert (random["sequence_ids"] == 0).any()
    assert set(random["token_type_ids"].flatten().tolist()) == {0, 1} == set(text["token_type_ids"].flatten().tolist())
    assert (text["input_ids"] == bert.tokenizer.mask_id).any()
    assert not (random["input_ids"][random["sequence_ids"] > 0] == bert.tokenizer.pad_id).any()

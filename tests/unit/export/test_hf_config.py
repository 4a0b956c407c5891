"""Hugging Face configs: what ours cannot compute is refused, every field comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel, RobertaConfig

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.hf_config import from_hf_config
from ctxlm_ds.export.huggingface import from_hf
from tests.unit.export.test_huggingface import CLASSES, hf_folder


@pytest.fixture(params=list(CLASSES))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer_folder(kind: str, wordpiece_folder: Path, byte_bpe_folder: Path) -> Path:
    return byte_bpe_folder if kind == "roberta" else wordpiece_folder


def test_other_models_are_refused(tmp_path: Path, wordpiece_folder: Path) -> None:
    bare = tmp_path / "bare"
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )  # fmt: skip
    BertModel(config).save_pretrained(bare)
    with pytest.raises(ExportError, match=r"not a BertForMaskedLM; save it .* missing: bert.*and 23 more; unknown: e"):
        from_hf(bare, tmp_path / "ours")
    (bare / "config.json").write_text('{"model_type": "t5"}')
    types = "bert, roberta, xlm-roberta, albert, electra, distilbert, gpt2 and"
    with pytest.raises(ExportError, match=f"model_type .t5. cannot be imported; only {types}"):
        from_hf(bare, tmp_path / "ours")
    (bare / "config.json").write_text("{")
    with pytest.raises(ExportError, match="cannot be read as JSON"):
        from_hf(bare, tmp_path / "ours")
    with pytest.raises(ExportError, match="names on the Hub"):
        from_hf(Path("google-bert/bert-base-uncased"), tmp_path / "ours")


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("bert", {"hidden_act": "silu"}, "silu"),
        ("bert", {"hidden_size": "wide"}, "config.json"),
        ("bert", {"num_hidden_layers": 3}, "encoder.layer.2"),
        ("bert", {"intermediate_size": 47}, "shape"),
        ("bert", {"num_attention_heads": 5}, "5 does not divide model.hidden_size 32"),
        ("roberta", {"hidden_act": "relu"}, "hidden_activation"),
    ],
)
def test_configs_that_compute_something_else_are_refused(
    kind: str, values: dict, reason: str, tmp_path: Path, wordpiece_folder: Path, byte_bpe_folder: Path
) -> None:
    original = hf_folder(kind, byte_bpe_folder if kind == "roberta" else wordpiece_folder, tmp_path / "original")
    raw = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({**raw, **values}))
    with pytest.raises(ExportError, match=reason):
        from_hf(original, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_config_fields_come_back(tmp_path: Path) -> None:
    BertConfig(hidden_act="gelu_new", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3).save_pretrained(
        tmp_path
    )
    _, model, pad_id, _ = from_hf_config(tmp_path)
    assert (model.hidden_activation, pad_id) == ("gelu_tanh", 0)
    assert (model.hidden_dropout, model.attention_dropout) == (0.2, 0.3)
    assert (model.vocab_size, model.max_position_embeddings) == (30522, 512)
    RobertaConfig(max_position_embeddings=514).save_pretrained(tmp_path)
    _, model, pad_id, _ = from_hf_config(tmp_path)
    assert (model.family, model.max_position_embeddings, pad_id) == ("roberta", 512, 1)

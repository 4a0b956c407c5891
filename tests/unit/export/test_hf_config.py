"""Hugging Face configs: what ours cannot compute is refused, every field comes back; the weight files of a folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, RobertaConfig

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.hf_config import INDEX_FILE, SINGLE_FILE, fingerprint, from_hf_config, model_files
from ctxlm_ds.export.huggingface import from_hf
from tests.checkpoints import change_json
from tests.unit.export.test_huggingface import hf_folder


def test_other_models_are_refused(tmp_path: Path, wordpiece_folder: Path) -> None:
    bare = tmp_path / "bare"
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )  # fmt: skip
    BertModel(config).save_pretrained(bare)
    with pytest.raises(ExportError, match=r"not a BertForMaskedLM; .*from-hf --new-head .*missing: cls.* and 2 more$"):
        from_hf(bare, tmp_path / "ours")
    code = (
        "import sys\nfrom pathlib import Path\nfrom ctxlm_ds.export.hf_config import check_tensors\n"
        "check_tensors(Path(sys.argv[1]), True)\n"
        "try:\n    check_tensors(Path(sys.argv[1]), False)\n"
        "finally:\n    assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(bare)], capture_output=True, text=True)
    assert done.returncode == 1 and "ExportError: " in done.stderr and "--new-head" in done.stderr
    weights = load_file(bare / "model.safetensors")
    del weights["encoder.layer.0.output.dense.weight"]
    save_file(weights, bare / "model.safetensors", {"format": "pt"})
    for new_head in (False, True):
        with pytest.raises(ExportError, match=r"not a BertForMaskedLM; save it .*missing: bert\.encoder\.layer\.0"):
            from_hf(bare, tmp_path / "ours", new_head)
    (bare / "config.json").write_text('{"model_type": "mamba"}')
    types = (
        "bert, roberta, xlm-roberta, albert, electra, distilbert, modernbert, t5, bart, mbart, xlnet, megatron-bert, "
        "gpt2, openai-gpt"
    )
    with pytest.raises(ExportError, match=f"model_type .mamba. cannot be imported; only {types} and"):
        from_hf(bare, tmp_path / "ours")
    (bare / "config.json").write_text("{")
    with pytest.raises(ExportError, match="cannot be read as JSON"):
        from_hf(bare, tmp_path / "ours")
    with pytest.raises(ExportError, match="names on the Hub"):
        from_hf(Path("google-bert/bert-base-uncased"), tmp_path / "ours")


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("bert", {"hidden_act": "silu"}, "silu"),
        ("bert", {"hidden_size": "wide"}, "config.json"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "silu"}, "activation_function 'silu' is not one of"),
        ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("openai-gpt", {"afn": "silu"}, "afn 'silu' is not one of gelu, relu"),
        ("xlnet", {"clamp_len": 5}, "clamp_len"),
        ("modernbert", {"norm_bias": True}, "norm_bias is True; only"),
        ("modernbert", {"decoder_bias": False}, "decoder_bias is False; only"),
        ("modernbert", {"mlp_dropout": 0.1}, "mlp_dropout is 0.1; only"),
        ("modernbert", {"classifier_activation": "relu"}, "classifier_activation is 'relu' and hidden_activation"),
        ("modernbert", {"layer_types": ["sliding_attention"] * 22}, "layer_types has no full_attention at layer 0"),
        ("modernbert", {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }}, "rope_type 'linear'"),
    ],
)  # fmt: skip
def test_configs_that_compute_something_else_are_refused(
    model_type: str, values: dict, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
    with pytest.raises(ExportError, match=reason):
        from_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"num_hidden_layers": 3}, "encoder.layer.2"),
        ({"intermediate_size": 47}, "shape"),
        ({"num_attention_heads": 5}, "5 does not divide model.hidden_size 32"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    values: dict, reason: str, tmp_path: Path, wordpiece_folder: Path
) -> None:
    original = hf_folder("bert", wordpiece_folder, tmp_path / "original")
    change_json(original / "config.json", **values)
    with pytest.raises(ExportError, match=reason):
        from_hf(original, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_tokenizer_without_a_mask_token_is_named_by_its_folder(tmp_path: Path, wordpiece_folder: Path) -> None:
    original = hf_folder("bert", wordpiece_folder, tmp_path / "original")
    content = json.loads((original / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[MASK]"]
    content["model"]["vocab"]["word"] = content["model"]["vocab"].pop("[MASK]")
    (original / "tokenizer.json").write_text(json.dumps(content))
    (original / "tokenizer_config.json").write_text('{"sep_token": "[SEP]"}')
    for new_head in (False, True):
        with pytest.raises(ExportError, match=re.escape(f"{original}: the tokenizer has no mask token")):
            from_hf(original, tmp_path / "ours", new_head)


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


def test_config_of_the_released_modernbert_is_understood(tmp_path: Path) -> None:
    """Settings of answerdotai/ModernBERT-large as written by the version of transformers at its release."""
    released = {
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "embedding_dropout": 0.0,
        "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "hidden_activation": "gelu", "hidden_size": 1024, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02,
        "intermediate_size": 2624, "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert",
        "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 16, "num_hidden_layers": 28,
        "pad_token_id": 50283, "position_embedding_type": "absolute", "sep_token_id": 50282,
        "tie_word_embeddings": True, "vocab_size": 50368,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(released))
    _, model, pad_id, kept = from_hf_config(tmp_path)
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads, model.intermediate_size)
    assert shape == (28, 1024, 16, 2624) and (pad_id, kept["classifier_pooling"]) == (50283, "mean")
    assert (model.global_attention_every, model.local_attention) == (3, 128)
    assert (model.global_rotary_base, model.local_rotary_base) == (160_000.0, 10_000.0)
    assert (model.hidden_dropout, model.attention_dropout, model.initializer) == (0.0, 0.0, "truncated_normal")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, which the index names more than once and in another order."""
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_text(name)
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_each_shard_is_listed_once_and_a_single_file_alone(folder: Path) -> None:
    assert [path.name for path in model_files(folder)] == ["a.safetensors", "b.safetensors"]
    (folder / INDEX_FILE).unlink()
    (folder / SINGLE_FILE).write_text("x")
    assert model_files(folder) == [folder / SINGLE_FILE]


@pytest.mark.parametrize("name", ["config.json", "a.safetensors", "b.safetensors"])
def test_every_file_is_part_of_the_fingerprint(folder: Path, name: str) -> None:
    before = fingerprint(folder)
    assert len(before) == 64 and before == fingerprint(folder)
    (folder / name).write_text("[]")
    assert fingerprint(folder) != before


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": "c.safetensors"}, "c.safetensors is missing although model.safetensors.index.json lists it"),
        ({"x": "../a.safetensors"}, "is not in the model's folder"),
        ({"x": "/etc/passwd"}, "is not in the model's folder"),
        ({"x": ".."}, "is not in the model's folder"),
        ({"x": "a" * 300}, "is not in the model's folder"),
        ({"x": 5}, "no weight_map of file names"),
        ({}, "no weight_map of file names"),
    ],
)
def test_an_index_that_leads_nowhere(folder: Path, weight_map: dict[str, object], message: str) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ExportError, match=message):
        model_files(folder)


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="has neither model.safetensors nor"):
        model_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ExportError, match=r"a pickle \(pytorch_model\.bin\), .*save_pretrained"):
        fingerprint(tmp_path)


def test_a_config_that_cannot_be_read(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ExportError, match="config.json: cannot be read"):
        fingerprint(folder)

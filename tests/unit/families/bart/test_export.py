"""BART and mBART of transformers to ours and back, with tokenizers and generate(), and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BartTokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
)
from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.checkpoints import change_json, change_weights, random_weights, write_checkpoint

CLASSES: dict[str, Any] = {
    "bart": (BartConfig, BartForConditionalGeneration, BartTokenizer),
    "mbart": (MBartConfig, MBartForConditionalGeneration, MBartTokenizer),
}
SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 40, "init_std": 0.3,
}  # fmt: skip
TEXTS = ["It was the best of times, it was the worst of times.", "Call me Ishmael.", "2 + 2 = 4"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    texts = [f"{text} {number}" for number in range(40) for text in TEXTS]
    train_tokenizer("bpe", iter(texts), 300, folder / "bart")
    codes = {"language_codes": FAIRSEQ_LANGUAGE_CODES, "normalization": "whitespace"}
    train_tokenizer("unigram", iter(texts), 90, folder / "mbart", **codes)
    return {name: folder / name for name in CLASSES}


@pytest.fixture(params=list(CLASSES))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def their_folder(kind: str, tokenizer: Path, folder: Path, **settings: Any) -> Path:
    """A model of transformers' own with random weights, saved by transformers, its tokenizer beside it."""
    torch.manual_seed(3)
    config_class, model_class, _ = CLASSES[kind]
    config = config_class(**{**SIZES, "vocab_size": load_tokenizer(tokenizer).vocab_size, **settings})
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def our_config(kind: str, tokenizer: Path, objective: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_decoder_layers": 3, "num_attention_heads": 4,
             "intermediate_size": 48, "max_position_embeddings": 40}  # fmt: skip
    return RunConfig.model_validate({
        "model": {"family": kind, "vocab_size": load_tokenizer(tokenizer).vocab_size, **sizes, **model},
        "objective": objective or {"name": "prefix_lm", "decoder_start": "sep"},
        "data": {"sample_format": "full_sentences", "seq_length": 32}, "tokenizer": {"path": str(tokenizer)},
    })  # fmt: skip


def test_an_export_writes_from_its_own_start_token(kind: str, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    config = our_config(kind, tokenizers[kind])
    exported = to_hf(write_checkpoint(tmp_path / "step-00000100", config, random_weights(config)), tmp_path / "hf")
    names = [comparison.name for comparison in exported.comparisons]
    assert names == [f"{rows}/decoder_logits" for rows in ("random", "longest", "text")]
    assert all(comparison.relative < 1e-5 for comparison in exported.comparisons)
    tokenizer = load_tokenizer(tokenizers[kind])
    _, model_class, tokenizer_class = CLASSES[kind]
    loaded = tokenizer_class.from_pretrained(tmp_path / "hf")
    assert [loaded(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == tokenizer.encode_batch(TEXTS)
    assert loaded.mask_token_id == tokenizer.mask_id
    model = model_class.from_pretrained(tmp_path / "hf")
    assert not model.final_logits_bias.any() and model.generation_config.forced_eos_token_id == tokenizer.sep_id
    written = model.generate(**loaded(TEXTS[0], return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert written[0, 0] == model.generation_config.decoder_start_token_id == tokenizer.sep_id


@pytest.mark.parametrize(("name", "settings", "wanted"), [
    ("bart", {}, (2, 0)), ("bart", {"decoder_start": "pad"}, (1, 0)),
    ("mbart", {"language_tokens": True, "sentence_end": None}, (None, None)),
])  # fmt: skip
def test_generation_begins_as_the_targets_of_the_run(
    name: str, settings: dict[str, Any], wanted: tuple[Any, Any], tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    """With language tokens the caller of generate() names the language."""
    config = our_config(name, tokenizers[name], {"name": "text_infilling", **settings})
    to_hf(write_checkpoint(tmp_path / "step-00000100", config, random_weights(config)), tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "imported")
    to_hf(tmp_path / "imported", tmp_path / "again")
    for folder in ("hf", "again"):
        generation = CLASSES[name][1].from_pretrained(tmp_path / folder).generation_config
        assert (generation.decoder_start_token_id, generation.forced_bos_token_id) == wanted


def test_names_of_the_hub_files_are_understood(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    """facebook/bart-base has the names of the bare model."""
    original = their_folder("bart", tokenizers["bart"], tmp_path / "original")
    tensors = {name.removeprefix("model."): value for name, value in load_file(original / "model.safetensors").items()}
    tensors |= {"encoder.version": torch.tensor([3.0]), "final_logits_bias": torch.zeros(1, 300)}
    save_file(tensors, original / "model.safetensors", metadata={"format": "pt"})
    assert from_hf(original, tmp_path / "ours").num_parameters == sum(
        value.numel() for name, value in tensors.items() if name not in ("encoder.version", "final_logits_bias")
    )


def test_what_ours_cannot_compute_is_refused(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    original = their_folder("bart", tokenizers["bart"], tmp_path / "original")
    change_weights(original, lambda tensors: tensors.update({"final_logits_bias": torch.ones(1, 300)}))
    with pytest.raises(ExportError, match="final_logits_bias is not 0"):
        from_hf(original, tmp_path / "ours")
    change_json(original / "config.json", decoder_ffn_dim=64)
    with pytest.raises(ExportError, match="decoder_ffn_dim 64 is not encoder_ffn_dim 48"):
        from_hf(original, tmp_path / "ours")


def test_another_epsilon_cannot_be_exported(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    config = our_config("bart", tokenizers["bart"], layer_norm_eps=1e-6)
    checkpoint = write_checkpoint(tmp_path / "step-00000100", config, random_weights(config))
    with pytest.raises(ExportError, match=r"layer_norm_eps is 1e-06: BartForConditionalGeneration always computes"):
        to_hf(checkpoint, tmp_path / "hf")

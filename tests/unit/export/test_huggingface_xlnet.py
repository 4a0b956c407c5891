"""XLNet with its sentencepiece tokenizer: from transformers' own class, and back to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, XLNetConfig, XLNetLMHeadModel

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents


def save_original(folder: Path, **settings: object) -> XLNetLMHeadModel:
    """A model of transformers with the tokenizer of `folder`."""
    torch.manual_seed(3)
    config = XLNetConfig(
        vocab_size=load_tokenizer(folder / "tokenizer").vocab_size, d_model=32, n_layer=2, n_head=4, d_inner=48,
        initializer_range=0.3, mem_len=None, **settings,
    )  # fmt: skip
    theirs = XLNetLMHeadModel(config).eval()
    theirs.save_pretrained(folder / "original")
    AutoTokenizer.from_pretrained(folder / "tokenizer").save_pretrained(folder / "original")
    return theirs


def test_a_model_of_transformers_comes_back_as_it_was(tmp_path: Path) -> None:
    train_tokenizer("xlnet", make_documents(60, seed=3), 200, tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    theirs = save_original(tmp_path)
    from_hf(tmp_path / "original", tmp_path / "ours")
    section = load_config(tmp_path / "ours" / "config.yaml").model
    assert (section.family, section.hidden_activation, section.mem_len) == ("xlnet", "gelu", 0)  # type: ignore[attr-defined]
    to_hf(tmp_path / "ours", tmp_path / "back")
    back, info = XLNetLMHeadModel.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, value in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    ids = AutoTokenizer.from_pretrained(tmp_path / "back")("Ada crossed the river.", return_tensors="pt")
    expected = [*tokenizer.encode_batch(["Ada crossed the river."])[0], tokenizer.sep_id, tokenizer.cls_id]
    assert ids["input_ids"][0].tolist() == expected
    with torch.no_grad():
        assert torch.equal(back.eval()(**ids).logits, theirs(**ids).logits)
    from_hf(tmp_path / "back", tmp_path / "again")


def test_models_that_are_not_the_published_one_are_refused(tmp_path: Path) -> None:
    train_tokenizer("xlnet", make_documents(60, seed=3), 200, tmp_path / "tokenizer")
    save_original(tmp_path, clamp_len=5)
    with pytest.raises(ExportError, match="clamp_len"):
        from_hf(tmp_path / "original", tmp_path / "ours")

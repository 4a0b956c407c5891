"""XLNet with its sentencepiece tokenizer: from transformers' own class, and back to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, XLNetConfig, XLNetLMHeadModel

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.huggingface import from_hf
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


def test_models_that_are_not_the_published_one_are_refused(tmp_path: Path) -> None:
    train_tokenizer("xlnet", make_documents(60, seed=3), 200, tmp_path / "tokenizer")
    save_original(tmp_path, clamp_len=5)
    with pytest.raises(ExportError, match="clamp_len"):
        from_hf(tmp_path / "original", tmp_path / "ours")

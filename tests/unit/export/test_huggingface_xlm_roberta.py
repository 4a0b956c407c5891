"""XLM-R with its sentencepiece tokenizer: from transformers' own class, and back to it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, XLMRobertaConfig, XLMRobertaForMaskedLM

from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents


def test_a_model_of_transformers_comes_back_as_it_was(tmp_path: Path) -> None:
    train_tokenizer("unigram", make_documents(60, seed=3), 200, tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert (tokenizer.cls_id, tokenizer.pad_id, tokenizer.sep_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert tokenizer.mask_id == tokenizer.vocab_size - 1
    torch.manual_seed(3)
    config = XLMRobertaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=42, type_vocab_size=1, layer_norm_eps=1e-5, initializer_range=0.3,
    )  # fmt: skip
    theirs = XLMRobertaForMaskedLM(config).eval()
    theirs.roberta.embeddings.token_type_embeddings.weight.data.zero_()
    theirs.save_pretrained(tmp_path / "original")
    AutoTokenizer.from_pretrained(tmp_path / "tokenizer").save_pretrained(tmp_path / "original")

    from_hf(tmp_path / "original", tmp_path / "ours")
    assert load_config(tmp_path / "ours" / "config.yaml").model.family == "xlm_roberta"
    to_hf(tmp_path / "ours", tmp_path / "back")

    back, info = XLMRobertaForMaskedLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (back.config.model_type, back.config.architectures) == ("xlm-roberta", ["XLMRobertaForMaskedLM"])
    for name, value in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    loaded = AutoTokenizer.from_pretrained(tmp_path / "back")
    ids = loaded(["Ada crossed the river."], return_tensors="pt")
    assert ids["input_ids"][0].tolist()[1:-1] == tokenizer.encode_batch(["Ada crossed the river."])[0]
    with torch.no_grad():
        assert torch.equal(back.eval()(**ids).logits, theirs(**ids).logits)

"""What transformers' T5 cannot do by default."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import T5ForConditionalGeneration

from ctxlm_ds.export.huggingface import to_hf
from ctxlm_ds.recipe.schema import RunConfig
from tests.checkpoints import SIZES, make_tokenizer, random_weights, write_checkpoint


@pytest.mark.parametrize("num_decoder_layers", [1, 3])
def test_a_deeper_decoder_writes_text(num_decoder_layers: int, tmp_path: Path) -> None:
    tokenizer = make_tokenizer("t5", tmp_path / "tok")
    config = RunConfig.model_validate({
        "model": {"family": "t5", "vocab_size": 304, **SIZES, "num_decoder_layers": num_decoder_layers},
        "data": {"sample_format": "full_sentences", "seq_length": 32}, "objective": {"name": "prefix_lm"},
        "tokenizer": {"path": str(tokenizer)},
    })  # fmt: skip
    to_hf(write_checkpoint(tmp_path / "step-00000100", config, random_weights(config)), tmp_path / "hf")
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "hf").eval()
    assert model.generation_config.use_cache == (num_decoder_layers <= 2)
    ids = torch.tensor([[5, 6, 7, 1]])
    written = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert torch.equal(
        written, model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=False)
    )

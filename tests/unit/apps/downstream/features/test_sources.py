"""A source's vectors are transformers' hidden states at the subwords of word_ids, in any batch and over windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ctxlm_ds.apps.downstream.features.sources import TransformersSource, open_source
from ctxlm_ds.errors import ConfigError, CtxlmError
from tests.downstream_models import hidden_states, write_bert

SENTENCES = [["the", "film", "was", "unknowns", "."], ["Ann"], ["who", "met", "unknown", "\u200b", "Ann", "?"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("sources") / "bert")


@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_vectors_are_transformers_hidden_states(folder: Path, pooling: str) -> None:
    source = TransformersSource(folder, pooling)
    assert (source.num_layers, source.width) == (4, 32)
    for words, found in zip(SENTENCES, source.vectors(SENTENCES), strict=True):
        states, word_ids = hidden_states(folder, words)
        assert found.shape == (4, len(words), 32)
        for word in range(len(words)):
            places = [at for at, one in enumerate(word_ids) if one == word]
            if not places:
                assert words[word] == "\u200b" and not found[:, word].any()
                continue
            chosen = {"first": places[:1], "last": places[-1:], "mean": places}[pooling]
            np.testing.assert_allclose(found[:, word], states[:, chosen].mean(axis=1), atol=1e-6)
        alone = next(source.vectors([words]))
        np.testing.assert_allclose(found, alone, atol=1e-6)


def test_a_long_sentence_is_read_in_windows(folder: Path) -> None:
    words = ["the", "good", "unknowns", "film"] * 12
    source = TransformersSource(folder, max_length=16)
    (found,) = source.vectors([words])
    assert found.shape == (4, 48, 32) and np.abs(found).sum(axis=-1).all()
    states, word_ids = hidden_states(folder, words[:10])
    # The first words are read in the first window, which ends inside the third `unknowns`.
    tokens = source.tokenizer(words, is_split_into_words=True)["input_ids"][:15]
    text = source.tokenizer.convert_ids_to_tokens(tokens)
    with torch.no_grad():
        rows = torch.tensor([[*tokens, source.tokenizer.sep_token_id]])
        window = torch.stack(source.model(input_ids=rows, output_hidden_states=True).hidden_states)[:, 0]
    assert text[1:4] == ["the", "good", "un"]
    np.testing.assert_allclose(found[:, :2], window[:, 1:3].numpy(), atol=1e-6)


@pytest.mark.parametrize("name", ["t5", "gpt2", "xlnet"])
def test_encoders_of_pairs_and_decoders(tmp_path: Path, folder: Path, name: str) -> None:
    """The encoder of an encoder-decoder; a decoder, whose words know nothing of those after them."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    shapes = {
        "t5": {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 2, "decoder_start_token_id": 0},
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 16},
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(1)
    AutoModel.from_config(AutoConfig.for_model(name, vocab_size=len(tokenizer), **shapes[name])).save_pretrained(
        tmp_path
    )
    source = open_source(tmp_path)
    found = list(source.vectors(SENTENCES))
    assert [one.shape for one in found] == [(3, len(words), 16) for words in SENTENCES]
    for words, vectors in zip(SENTENCES, found, strict=True):
        np.testing.assert_allclose(next(source.vectors([words])), vectors, atol=1e-5)
    if name == "gpt2":
        np.testing.assert_allclose(next(source.vectors([SENTENCES[0][:2]])), found[0][:, :2], atol=1e-5)


def test_what_is_no_source_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        open_source(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_source(tmp_path)
    with pytest.raises(ConfigError, match="--separate-directions: .* is no ELMo"):
        open_source(folder, separate=True)
    (tmp_path / "glove.txt").write_text("the 1 2\n")
    with pytest.raises(ConfigError, match=r"--pooling mean: .*glove\.txt has no subwords; drop the option"):
        open_source(tmp_path / "glove.txt", "mean")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CtxlmError, match="no tokenizer; copy the model"):
        open_source(tmp_path)

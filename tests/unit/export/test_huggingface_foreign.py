"""Weights of another system as a Hugging Face folder: vocabularies, and folders that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctxlm_ds.errors import CheckpointError, ExportError
from ctxlm_ds.export.huggingface import ForeignWeights, cut_vocabulary, write_plain_folder
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, random_weights

SHAPE = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
         "max_position_embeddings": 40, "layer_norm_eps": 1e-12}  # fmt: skip


def weights_of(kind: str, tokenizer: Path, folder: Path) -> ForeignWeights:
    config = make_config(kind, tokenizer)
    return ForeignWeights(folder, "bert", SHAPE, random_weights(config))


@pytest.mark.parametrize(("kind", "hf_class"), [("bert", "BertForMaskedLM"), ("bert_nsp", "BertForPreTraining")])
def test_the_heads_among_the_tensors_choose_the_class(
    kind: str, hf_class: str, wordpiece_folder: Path, tmp_path: Path
) -> None:
    weights = weights_of(kind, wordpiece_folder, tmp_path / "source")
    tokenizer = load_tokenizer(wordpiece_folder)
    assert write_plain_folder(weights, tokenizer, tmp_path / "hf").hf_class == hf_class
    # An earlier import is replaced, another folder is not.
    write_plain_folder(weights, tokenizer, tmp_path / "hf")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(CheckpointError, match="would be overwritten"):
        write_plain_folder(weights, tokenizer, tmp_path / "other")


def test_settings_that_fit_no_section_are_refused(wordpiece_folder: Path, tmp_path: Path) -> None:
    weights = weights_of("bert", wordpiece_folder, tmp_path)
    wrong_values = (({"num_attention_heads": 5}, "does not divide"), ({"layer_norm_eps": -1}, "no model of this"))
    for change, words in wrong_values:
        wrong = ForeignWeights(tmp_path / "source", "bert", SHAPE | change, weights.tensors)
        with pytest.raises(ExportError, match=words):
            write_plain_folder(wrong, load_tokenizer(wordpiece_folder), tmp_path / "hf")


def test_vocabularies_are_cut_and_never_grown(tmp_path: Path) -> None:
    table = "word_embeddings.weight"
    tensors = {table: torch.arange(8.0)[:, None], "other": torch.ones(8)}
    cut_vocabulary(tensors, 5, tmp_path)
    assert tensors[table].shape == (5, 1) and tensors["other"].shape == (8,)
    with pytest.raises(ExportError, match=f"{table} has 5 rows, the tokenizer 6 ids: if .*resize_token_embeddings"):
        cut_vocabulary(tensors, 6, tmp_path)

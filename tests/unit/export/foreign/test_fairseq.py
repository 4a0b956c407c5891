"""fairseq's RoBERTa against torch's own transformer layers."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from ctxlm_ds.errors import CheckpointError, CtxlmError, ExportError
from ctxlm_ds.export.foreign.fairseq import from_fairseq
from ctxlm_ds.tokenizers.load import load_tokenizer

WIDTH, HEADS, INNER, LAYERS, POSITIONS = 32, 4, 48, 3, 40
ENCODER = "encoder.sentence_encoder"
ARGUMENTS = Namespace(
    encoder_attention_heads=HEADS, activation_fn="gelu", dropout=0.1, attention_dropout=0.1, arch="roberta_base",
    encoder_normalize_before=False, untie_weights_roberta=False,
)  # fmt: skip


class Reference(nn.Module):
    """fairseq/models/roberta/model.py written with torch's layers."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab_size, WIDTH), nn.Embedding(POSITIONS + 2, WIDTH)
        self.norm, self.head_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, 0.0, "gelu", batch_first=True) for _ in range(LAYERS)
        )
        self.dense, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(vocab_size))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.words(ids) + self.positions(torch.arange(ids.shape[1]) + 2))
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.head_norm(functional.gelu(self.dense(hidden)))
        return functional.linear(hidden, self.words.weight) + self.bias

    def fairseq_names(self, encoder: str, joined: bool) -> dict[str, Tensor]:
        """The tensors under fairseq's names, of 2019 (`joined`) or later."""
        embeddings_norm = "emb_layer_norm" if joined else "layernorm_embedding"
        own = {"linear1": "fc1", "linear2": "fc2", "norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"}
        found = {
            f"{encoder}.sentence_encoder.embed_tokens.weight": self.words.weight,
            f"{encoder}.sentence_encoder.embed_positions.weight": self.positions.weight,
            f"{encoder}.lm_head.weight": self.words.weight,
            f"{encoder}.lm_head.bias": self.bias,
        }
        for name, module in (("sentence_encoder." + embeddings_norm, self.norm), ("lm_head.dense", self.dense),
                             ("lm_head.layer_norm", self.head_norm)):  # fmt: skip
            found |= {f"{encoder}.{name}.{leaf}": value for leaf, value in module.named_parameters()}
        for number, layer in enumerate(self.layers):
            for name, value in layer.named_parameters():
                for theirs, fairseq in own.items():
                    name = name.replace(theirs, fairseq)
                found |= projections(f"{encoder}.sentence_encoder.layers.{number}.{name}", value, joined)
        return {name: value.detach().clone() for name, value in found.items()}


def projections(name: str, value: Tensor, joined: bool) -> dict[str, Tensor]:
    """A parameter under fairseq's names, which divide the joint projection of queries, keys and values today."""
    if joined or "in_proj_" not in name:
        return {name: value}
    base, leaf = name.split("in_proj_")
    return {f"{base}{part}_proj.{leaf}": share for part, share in zip("qkv", value.chunk(3), strict=True)}


def randomized(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or name.startswith("ends")
            parameter.copy_(0.2 * torch.randn(parameter.shape) + (is_norm and name.endswith("weight")))
    return model.eval()


@pytest.fixture
def reference(byte_bpe_folder: Path) -> nn.Module:
    return randomized(Reference(load_tokenizer(byte_bpe_folder).vocab_size))


def save(path: Path, content: dict[str, Any], is_zip: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    return path


@pytest.mark.parametrize("joined", [True, False], ids=["2019", "today"])
def test_logits_are_those_of_torchs_layers(
    joined: bool, reference: Reference, byte_bpe_folder: Path, tmp_path: Path
) -> None:
    model = reference.fairseq_names("decoder" if joined else "encoder", joined)
    model |= {"classification_heads.mnli.dense.weight": torch.zeros(2, 2)}
    # Dictionaries are padded to a multiple of 8 with madeupword0000.
    for name in [name for name in model if name.endswith(("embed_tokens.weight", "lm_head.weight", "lm_head.bias"))]:
        model[name] = functional.pad(model[name], (0,) * (2 * model[name].dim() - 1) + (5,))
    arguments = {"args": ARGUMENTS} if joined else {"args": None, "cfg": {"model": ARGUMENTS, "task": None}}
    save(tmp_path / "run" / "model.pt", {**arguments, "model": model}, is_zip=not joined)
    done = from_fairseq(tmp_path / "run", byte_bpe_folder, tmp_path / "hf")
    assert done.hf_class == "RobertaForMaskedLM"
    theirs = transformers.RobertaForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    ids = torch.randint(4, reference.bias.shape[0], (2, POSITIONS))
    with torch.no_grad():
        difference = float((theirs(ids).logits - reference(ids)).abs().max())
    assert difference < 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoder_normalize_before": True}, "trained with encoder_normalize_before True"),
        ({"no_scale_embedding": False}, "trained with no_scale_embedding False"),
        ({"encoder_attention_heads": None}, "encoder_attention_heads is None, not a number"),
        ({"untie_weights_roberta": True}, "trained with untie_weights_roberta"),
        ({"activation_fn": "swish"}, "activation_fn 'swish' is not one of gelu"),
    ],
)
def test_what_no_plain_class_computes_is_refused(
    change: dict[str, Any], words: str, reference: Reference, byte_bpe_folder: Path, tmp_path: Path
) -> None:
    arguments = Namespace(**vars(ARGUMENTS) | change)
    path = save(tmp_path / "model.pt", {"args": arguments, "model": reference.fairseq_names("encoder", False)})
    with pytest.raises(ExportError, match=words):
        from_fairseq(path, byte_bpe_folder, tmp_path / "hf")


def test_mismatches_are_named(
    reference: Reference, byte_bpe_folder: Path, wordpiece_folder: Path, tmp_path: Path
) -> None:
    model = reference.fairseq_names("encoder", False)

    def refused(
        words: str, tokenizer: Path = byte_bpe_folder, error: type[CtxlmError] = ExportError, **content: Any
    ) -> None:
        path = save(tmp_path / "model.pt", {"args": ARGUMENTS, "model": model, **content})
        with pytest.raises(error, match=words):
            from_fairseq(path, tokenizer, tmp_path / "hf")
        assert not (tmp_path / "hf").exists()

    refused("fairseq's dictionary begins with <s>, <pad>, </s>, <unk>", wordpiece_folder)
    refused("only a Namespace is read", args=None)
    refused("holds no model of fairseq", model=None)
    refused("the tensor encoder.adapter is not part of", model=model | {"encoder.adapter": torch.ones(1)})
    refused("differs from the word embeddings", model=model | {"encoder.lm_head.weight": torch.zeros(300, WIDTH)})
    whole = dict(model)
    for name, words in (
        (f"{ENCODER}.layers.1.self_attn.k_proj.weight", "k_proj.weight is missing"),
        (f"{ENCODER}.layers.1.self_attn.q_proj.weight", "q_proj.weight is missing"),
        (f"{ENCODER}.embed_positions.weight", "position_embeddings.weight is missing"),
        (f"{ENCODER}.layers.0.fc1.weight", "encoder.0.mlp.up.weight is missing"),
    ):
        refused(words, model={key: value for key, value in whole.items() if key != name})
    del model[f"{ENCODER}.layers.1.fc1.bias"]
    refused("encoder.1.mlp.up.bias is missing", error=CheckpointError)

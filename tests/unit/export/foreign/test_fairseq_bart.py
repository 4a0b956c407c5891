"""fairseq's BART and mBART against torch's own transformer layers."""

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
from tests.unit.export.foreign.test_fairseq import projections, randomized, save

WIDTH, HEADS, INNER, LAYERS, DECODER_LAYERS, POSITIONS = 32, 4, 48, 2, 3, 40
STACKS = ("encoder", "decoder")
BART = {
    "arch": "bart_base", "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "activation_fn": "gelu",
    "dropout": 0.1, "attention_dropout": 0.2, "relu_dropout": 0.0, "activation_dropout": 0.3,
    "encoder_normalize_before": False, "decoder_normalize_before": False, "encoder_learned_pos": True,
    "decoder_learned_pos": True, "layernorm_embedding": True, "share_all_embeddings": True, "no_scale_embedding": True,
}  # fmt: skip
MBART = {**BART, "arch": "mbart_large", "encoder_normalize_before": True, "decoder_normalize_before": True,
         "no_scale_embedding": False}  # fmt: skip
NAMES = {
    "encoder": {"linear1": "fc1", "linear2": "fc2", "norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"},
    "decoder": {"multihead_attn": "encoder_attn", "linear1": "fc1", "linear2": "fc2", "norm1": "self_attn_layer_norm",
                "norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"},
}  # fmt: skip
"""torch's names -> fairseq's."""


class Reference(nn.Module):
    """fairseq/models/bart/model.py written with torch's layers."""

    def __init__(self, vocab_size: int, is_mbart: bool) -> None:
        super().__init__()
        settings = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": is_mbart}
        self.words = nn.Embedding(vocab_size, WIDTH)
        self.positions = nn.ModuleDict({stack: nn.Embedding(POSITIONS + 2, WIDTH) for stack in STACKS})
        self.norms = nn.ModuleDict({stack: nn.LayerNorm(WIDTH) for stack in STACKS})
        self.ends = nn.ModuleDict({stack: nn.LayerNorm(WIDTH) for stack in STACKS} if is_mbart else {})
        layers: dict[str, list[nn.Module]] = {
            "encoder": [nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, **settings) for _ in range(LAYERS)],
            "decoder": [nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, **settings) for _ in range(DECODER_LAYERS)],
        }
        self.layers = nn.ModuleDict({stack: nn.ModuleList(layers[stack]) for stack in STACKS})
        self.scale = WIDTH**0.5 if is_mbart else 1.0

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        memory = self.embed("encoder", ids)
        for layer in self.layers["encoder"]:
            memory = layer(memory)
        memory = self.end("encoder", memory)
        hidden = self.embed("decoder", target)
        later = torch.ones(2 * target.shape[1:], dtype=torch.bool).triu(1)
        for layer in self.layers["decoder"]:
            hidden = layer(hidden, memory, tgt_mask=later)
        return functional.linear(self.end("decoder", hidden), self.words.weight)

    def embed(self, stack: str, ids: Tensor) -> Tensor:
        places = self.positions[stack](torch.arange(ids.shape[1]) + 2)
        return self.norms[stack](self.words(ids) * self.scale + places)

    def end(self, stack: str, hidden: Tensor) -> Tensor:
        return self.ends[stack](hidden) if stack in self.ends else hidden

    def fairseq_names(self, joined: bool) -> dict[str, Tensor]:
        """The tensors under fairseq's names, of 2019 (`joined`) or later."""
        found: dict[str, Tensor] = {} if joined else {"decoder.output_projection.weight": self.words.weight}
        for stack in STACKS:
            found |= {f"{stack}.embed_tokens.weight": self.words.weight, f"{stack}.version": torch.tensor([3.0]),
                      f"{stack}.embed_positions.weight": self.positions[stack].weight}  # fmt: skip
            norms = {"layernorm_embedding": self.norms, "layer_norm": self.ends}
            for name, modules in norms.items():
                if stack in modules:
                    found |= {f"{stack}.{name}.{leaf}": value for leaf, value in modules[stack].named_parameters()}
            for number, layer in enumerate(self.layers[stack]):
                for name, value in layer.named_parameters():
                    part, rest = name.split(".", 1)
                    full = f"{stack}.layers.{number}.{NAMES[stack].get(part, part)}.{rest}"
                    found |= projections(full, value, joined)
        return {name: value.detach().clone() for name, value in found.items()}


def reference(folder: Path, is_mbart: bool) -> nn.Module:
    return randomized(Reference(load_tokenizer(folder).vocab_size, is_mbart))


@pytest.mark.parametrize("joined", [True, False], ids=["2019", "today"])
@pytest.mark.parametrize(("arguments", "name"), [(BART, "Bart"), (MBART, "MBart")], ids=["bart", "mbart"])
def test_logits_are_those_of_torchs_layers(
    arguments: dict[str, Any], name: str, joined: bool, byte_bpe_folder: Path, tmp_path: Path
) -> None:
    ours = reference(byte_bpe_folder, name == "MBart")
    model = ours.fairseq_names(joined) | {"classification_heads.mnli.dense.weight": torch.zeros(2, 2)}
    given = Namespace(**arguments)
    held = {"args": given} if joined else {"args": None, "cfg": {"model": given, "task": None}}
    save(tmp_path / "run" / "model.pt", {**held, "model": model}, is_zip=not joined)
    done = from_fairseq(tmp_path / "run", byte_bpe_folder, tmp_path / "hf")
    assert done.hf_class == f"{name}ForConditionalGeneration"
    theirs = getattr(transformers, done.hf_class).from_pretrained(tmp_path / "hf").eval()
    config = theirs.config
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.1, 0.2, 0.3)
    ids, target = (torch.randint(4, ours.words.num_embeddings, (2, length)) for length in (POSITIONS, 17))
    with torch.no_grad():
        logits = theirs(ids, decoder_input_ids=target).logits
        wanted = ours(ids, target)
    assert float((logits - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layernorm_embedding": False}, "trained with layernorm_embedding False, which BART's class"),
        ({"decoder_learned_pos": False}, "trained with decoder_learned_pos False"),
        ({"decoder_normalize_before": True}, "decoder_normalize_before True are not the same"),
        ({"decoder_attention_heads": 2}, "encoder_attention_heads 4 and decoder_attention_heads 2 are not"),
        ({"activation_dropout": "much"}, "activation_dropout is 'much', not a number"),
    ],
)
def test_what_no_plain_class_computes_is_refused(
    change: dict[str, Any], words: str, byte_bpe_folder: Path, tmp_path: Path
) -> None:
    model = reference(byte_bpe_folder, False).fairseq_names(False)
    path = save(tmp_path / "model.pt", {"args": Namespace(**BART | change), "model": model})
    with pytest.raises(ExportError, match=words):
        from_fairseq(path, byte_bpe_folder, tmp_path / "hf")


def test_mismatches_are_named(byte_bpe_folder: Path, tmp_path: Path) -> None:
    whole = reference(byte_bpe_folder, False).fairseq_names(False)

    def refused(words: str, model: dict[str, Tensor], error: type[CtxlmError] = ExportError) -> None:
        path = save(tmp_path / "model.pt", {"args": Namespace(**BART), "model": model})
        with pytest.raises(error, match=words):
            from_fairseq(path, byte_bpe_folder, tmp_path / "hf")
        assert not (tmp_path / "hf").exists()

    refused("the tensor encoder.adapter is not part of fairseq's BART", whole | {"encoder.adapter": torch.ones(1)})
    other = torch.zeros(300, WIDTH)
    refused("differs from the word embeddings, which BART", whole | {"decoder.output_projection.weight": other})
    table = "decoder.embed_positions.weight"
    refused("decoder_embeddings.position_embeddings.weight has shape", whole | {table: torch.ones(9, WIDTH)},
            CheckpointError)  # fmt: skip
    without = "decoder.layers.1.encoder_attn.v_proj.bias"
    refused("v_proj.bias is missing", {name: value for name, value in whole.items() if name != without})
    ended = {f"{stack}.layer_norm.{leaf}": torch.ones(WIDTH) for stack in STACKS for leaf in ("weight", "bias")}
    refused("encoder_layer_norm.weight is unknown", whole | ended, CheckpointError)

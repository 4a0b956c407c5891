"""From token ids to vectors and back: the tied word embedding, positions and token types.

Shape letters: b rows, s positions, p prediction slots, m sequences of a row, h width, v vocabulary.
"""

from __future__ import annotations

from torch import nn

from ctxlm_ds.config.schema import ModelConfig
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layer_list import Tensors
from ctxlm_ds.models.transformer import LayerNorm
from ctxlm_ds.parallel.layers import VocabParallelEmbedding

ROBERTA_POSITION_OFFSET = 2
"""RoBERTa's positions begin after its padding id, 1; rows 0 and 1 of the table are never used."""


def position_offset(config: ModelConfig) -> int:
    """Row of the position table that holds position 0."""
    return ROBERTA_POSITION_OFFSET if config.family == "roberta" else 0


class WordEmbeddings(VocabParallelEmbedding):
    """First layer of a model, and its last but one: the decoder tied to it (Press & Wolf 2017).

    Called through forward both times, so that hooks which gather its weight (ZeRO-3) run.
    """

    def forward(self, inputs: Tensors, decode: bool = False) -> Tensors:
        """(ids [b, s], rest…) -> ([b, s, h], rest…); with `decode` (hidden [b, p, h], rest…) -> ([b, p, v], rest…)."""
        first, *rest = inputs
        return (self.decode(first) if decode else self.look_up(first), *rest)


class InputEmbeddings(nn.Module):
    """Adds positions (and token types, BERT) to the words, then LayerNorm and dropout."""

    def __init__(self, config: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.position_offset = position_offset(config)
        num_positions = config.max_position_embeddings + self.position_offset
        self.position_embeddings = UnsetEmbedding(num_positions, config.hidden_size)
        self.token_type_embeddings = (
            UnsetEmbedding(config.type_vocab_size, config.hidden_size) if config.family == "bert" else None
        )
        self.layer_norm = LayerNorm(config, kernels)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, inputs: Tensors) -> Tensors:
        """(words [b, s, h], token_type_ids, position_ids, sequence_ids, …) -> ([b, s, h], sequence_ids, …)."""
        hidden, token_type_ids, position_ids, *rest = inputs
        if self.token_type_embeddings is not None:
            hidden = hidden + self.token_type_embeddings(token_type_ids)
        hidden = hidden + self.position_embeddings(position_ids + self.position_offset)
        return (self.dropout(self.layer_norm(hidden)), *rest)


class UnsetEmbedding(nn.Embedding):
    """torch.nn.Embedding whose values models/initialize.py gives."""

    def reset_parameters(self) -> None:
        """Leave the values unset."""

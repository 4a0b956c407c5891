"""From token ids to vectors and back: the tied word embedding, positions and token types.

Shape letters: b rows, s positions, p prediction slots, m sequences of a row, h width, v vocabulary, t tokens (b·s),
n tensor-parallel ranks. Hidden states are [b, s, h], or under sequence parallelism this rank's tokens [t / n, h].
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layer_list import Tensors
from ctxlm_ds.models.transformer import HiddenDropout, LayerNorm
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import VocabParallelEmbedding
from ctxlm_ds.parallel.mappings import own_tokens, share_parameters


class WordEmbeddings(VocabParallelEmbedding):
    """First layer of a model, and its last but one: the decoder tied to it (Press & Wolf 2017).

    Called through forward both times, so that hooks which gather its weight (ZeRO-3) run.
    """

    def forward(self, inputs: Tensors, decode: bool = False, split_tokens: bool = False) -> Tensors:
        """(ids [b, s], rest…) -> (hidden, rest…); with `decode` (hidden [b, p, h], rest…) -> (scores [b, p, v], rest…).

        v are this rank's words. `split_tokens`: the hidden states to decode are this rank's tokens.
        """
        first, *rest = inputs
        return (self.decode(first, split_tokens) if decode else self.look_up(first), *rest)


class InputEmbeddings(nn.Module):
    """Adds positions (and token types, BERT) to the words, then LayerNorm and dropout."""

    def __init__(self, config: TransformerSection, kernels: KernelSet, parallel: ParallelContext) -> None:
        super().__init__()
        self.position_offset = config.position_offset
        num_positions = config.max_position_embeddings + self.position_offset
        self.position_embeddings = SharedEmbedding(num_positions, config.hidden_size, parallel)
        self.token_type_embeddings = (
            SharedEmbedding(config.type_vocab_size, config.hidden_size, parallel) if config.family == "bert" else None
        )
        self.layer_norm = LayerNorm(config, kernels, parallel)
        self.dropout = HiddenDropout(config.hidden_dropout, parallel)

    def forward(self, inputs: Tensors) -> Tensors:
        """(words, token_type_ids, position_ids, sequence_ids, …) -> (hidden, sequence_ids, …)."""
        hidden, token_type_ids, position_ids, *rest = inputs
        if self.token_type_embeddings is not None:
            hidden = hidden + self.token_type_embeddings(token_type_ids)
        hidden = hidden + self.position_embeddings(position_ids + self.position_offset)
        return (self.dropout(self.layer_norm(hidden), "embeddings"), *rest)


class SharedEmbedding(nn.Embedding):
    """A small table that every rank holds; under sequence parallelism each looks up its own tokens."""

    def __init__(self, num_rows: int, width: int, parallel: ParallelContext) -> None:
        super().__init__(num_rows, width)
        self.parallel = parallel

    def reset_parameters(self) -> None:
        """Leave the values unset."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, s] -> [b, s, h], or this rank's tokens [t / n, h]."""
        if not self.parallel.splits_tokens:
            return super().forward(ids)
        (weight,) = share_parameters(self.parallel, self.weight)
        return functional.embedding(own_tokens(ids.flatten(), self.parallel), weight)

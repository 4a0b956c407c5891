"""Token ids to vectors and back: the tied word embedding, positions and token types.

Shape letters: b rows, s positions, p prediction slots, h width, v vocabulary of this rank, t tokens (b·s), n
tensor-parallel ranks. Hidden states are [b, s, h], or under sequence parallelism this rank's tokens [t / n, h].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.norms import LayerNorm
from ctxlm_ds.models.parts.transformer import initial_weights
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import EMBEDDINGS, HiddenDropout, VocabParallelEmbedding, VocabularyBias
from ctxlm_ds.parallel.mappings import own_tokens, share_parameters
from ctxlm_ds.parallel.parameters import Init, ParameterFacts, declare

if TYPE_CHECKING:
    from ctxlm_ds.families.base import TransformerSection

WORD_EMBEDDINGS = "word_embeddings"


@dataclass(frozen=True)
class WordTable:
    """Describes the layers of one word embedding: the look-up, and the decoder tied to it (Press & Wolf 2017)."""

    vocab_size: int | None
    """Must be known."""
    width: int
    init: Init
    build: ModelBuild
    layer: type[VocabParallelEmbedding] = VocabParallelEmbedding
    """May be a subclass with further uses of the table (`use`)."""
    name: str = WORD_EMBEDDINGS
    """Prefix of the parameter's name, which distinguishes several tables."""

    def look_up(self, ids: str = "input_ids", into: str = "hidden") -> LayerDescription:
        """Describe the layer that reads `ids` [b, s] and writes `into` [b, s, h]."""
        return self.use((ids,), (into,))

    def decode(self, hidden: str, into: str, split_tokens: bool = False) -> LayerDescription:
        """Describe the layer that reads `hidden` [..., h] and writes `into`, the scores of the words [..., v].

        `split_tokens`: under sequence parallelism `hidden` holds this rank's tokens; scores are those of all, [t, v].
        """
        return self.use((hidden,), (into,), decode=True, split_tokens=split_tokens)

    def decode_with_bias(self, hidden: str, bias: str, logits: str, **kwargs: Any) -> list[LayerDescription]:
        """Describe the decoder of `hidden`, and the layer `bias` that adds a number for each word to its scores."""
        scores = logits.replace("logits", "scores")
        kwargs |= {"vocab_size": self.vocab_size, "parallel": self.build.parallel}
        return [self.decode(hidden, scores), LayerDescription(bias, VocabularyBias, (scores,), (logits,), kwargs)]

    def use(self, reads: tuple[str, ...], writes: tuple[str, ...], **call: Any) -> LayerDescription:
        """Describe the table's layer called with `call`."""
        assert self.vocab_size is not None
        kwargs = {
            "vocab_size": self.vocab_size, "hidden_size": self.width, "init": self.init, "kernels": self.build.kernels,
            "parallel": self.build.parallel,
        }  # fmt: skip
        return LayerDescription(self.name, self.layer, reads, writes, kwargs, self.name, call)


def input_embeddings(
    model: TransformerSection, build: ModelBuild, stack: str = "", **settings: Any
) -> LayerDescription:
    """Describe the layer that adds positions to the words; `settings` are further arguments of InputEmbeddings.

    `stack` is `decoder_` for the layer of a decoder that reads an encoder.
    """
    types = ("token_type_ids",) if settings.get("num_token_types") else ()
    kwargs = {"model": model, "build": build, **settings}
    reads = ("hidden", f"{stack}position_ids", *types)
    return LayerDescription(f"{stack}embeddings", InputEmbeddings, reads, ("hidden",), kwargs)


class InputEmbeddings(nn.Module):
    """Adds learnt positions and, if there are any, token types to the words, then LayerNorm (encoders) and dropout."""

    def __init__(
        self,
        model: TransformerSection,
        build: ModelBuild,
        position_range: float | None = None,
        position_offset: int = 0,
        num_token_types: int = 0,
        layer_norm: bool = False,
        width: int | None = None,
        word_factor: float = 1.0,
    ) -> None:
        """Make the tables.

        `position_range` is the standard deviation of the initial positions, None for that of all weights;
        `position_offset` is the row that holds position 0. `num_token_types` are the rows of the token-type table, 0
        for none. `layer_norm` is before the dropout. `width` is that of the tables, None for that of the blocks. Words
        are multiplied by `word_factor`.
        """
        super().__init__()
        width, kernels, parallel = width or model.hidden_size, build.kernels, build.parallel
        self.position_offset = position_offset
        self.word_factor = word_factor
        rows = model.max_position_embeddings + position_offset
        positions = initial_weights(model, position_range)
        self.position_embeddings = SharedEmbedding(rows, width, positions, parallel, unused_rows=position_offset)
        self.token_type_embeddings = (
            SharedEmbedding(num_token_types, width, initial_weights(model), parallel) if num_token_types else None
        )
        self.layer_norm = LayerNorm(width, model.layer_norm_eps, kernels, parallel) if layer_norm else None
        self.dropout = HiddenDropout(model.hidden_dropout, kernels, parallel)

    def forward(self, hidden: Tensor, position_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Map words' vectors, position_ids and token_type_ids [b, s] to hidden states."""
        if self.word_factor != 1.0:
            hidden = hidden * self.word_factor
        if self.token_type_embeddings is not None:
            hidden = hidden + self.token_type_embeddings(token_type_ids)
        positions = self.position_embeddings(position_ids + self.position_offset)
        if self.layer_norm is None:
            return self.dropout(hidden + positions, EMBEDDINGS)
        return self.layer_norm(hidden, positions, drop=self.dropout.of(hidden, EMBEDDINGS), drop_last=True)


class SharedEmbedding(nn.Embedding):
    """A small table that every rank holds; under sequence parallelism each looks up its own tokens."""

    def __init__(
        self,
        num_rows: int,
        width: int,
        init: Init,
        parallel: ParallelContext,
        optional: bool = False,
        unused_rows: int | None = None,
    ) -> None:
        """Allocate the rows; `unused_rows` are those before position 0 of a position table, None for another table."""
        super().__init__(num_rows, width)
        facts = ParameterFacts(init, decays=True, optional=optional)
        if unused_rows is not None:
            facts = replace(facts, grows="position table", unused_rows=unused_rows)
        declare(self, weight=facts)
        self.parallel = parallel

    def reset_parameters(self) -> None:
        """Leave the values unset."""

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [b, s] to [b, s, h], or this rank's tokens [t / n, h]."""
        if not self.parallel.splits_tokens:
            return super().forward(ids)
        (weight,) = share_parameters(self.parallel, self.weight)
        return functional.embedding(own_tokens(ids.flatten(), self.parallel), weight)

"""Layers that ranks share: matrices, torch's or with tensor parallelism megatron-core's, word tables, dropout by key.

Parameters are allocated and left unset, with torch's default type and device: the CPU, `meta`, or ZeRO-3's partitions.
Each declares its facts and its initial value (parallel/parameters.py).
Shape letters: i inputs, o outputs of a layer, v rows of the vocabulary, h width, t tokens, n ranks of tensor
parallelism; `...` any leading dimensions.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.dropout import keyed_row_dropout
from ctxlm_ds.kernels.linear import LinearKernel, float32_linear
from ctxlm_ds.kernels.norm import Drop, DropRuns, in_runs
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import LinearCrossEntropy
from ctxlm_ds.parallel.mappings import (
    ColumnParallelProduct,
    reduce_from_ranks,
    reduce_scatter_tokens,
    share_parameters,
    token_runs,
)
from ctxlm_ds.parallel.parameters import ZEROS, Init, ParameterFacts, declare
from ctxlm_ds.parallel.placement import COLUMNS, VOCABULARY, Split


class Linear(nn.Linear):
    """torch.nn.Linear with a kernel that computes product, bias and, if there is one, activation."""

    def __init__(self, in_features: int, out_features: int, kernel: LinearKernel, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.kernel = kernel

    def reset_parameters(self) -> None:
        """Leave the values unset."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., i] to [..., o]."""
        return self.kernel(x, self.weight, self.bias)


def column_parallel_linear(
    in_features: int,
    out_features: int,
    init: Init,
    kernels: KernelSet,
    parallel: ParallelContext,
    activation: str | None = None,
    blocks: tuple[int, ...] = (),
    bias: bool = True,
) -> nn.Module:
    """Make a linear layer split by its outputs (query/key/value, the first feed-forward matrix).

    Every rank has the complete input [..., i], or under sequence parallelism its tokens. `init` is of the weight; the
    bias begins at 0. `activation` names what follows the product, if anything. `blocks` are the outputs of each part
    that is split separately; they add up to o.
    """
    split = Split("rows", blocks)
    if parallel.size == 1:
        kernel = _with_activation(kernels, kernels.linear, activation)
        layer: nn.Module = Linear(in_features, out_features, kernel, bias)
    else:
        from ctxlm_ds.parallel.megatron import ColumnParallelLinear

        product = column_product(kernels, parallel, parallel.splits_tokens)
        kernel = _with_activation(kernels, product, activation)
        layer = ColumnParallelLinear(in_features, out_features, kernel, parallel, bias)
    declare(layer, weight=ParameterFacts(init, decays=True, split=split, matrix=True))
    if bias:
        declare(layer, bias=ParameterFacts(ZEROS, decays=False, split=split))
    return layer


def row_parallel_linear(
    in_features: int, out_features: int, init: Init, kernels: KernelSet, parallel: ParallelContext, bias: bool = True
) -> nn.Module:
    """Make a linear layer split by its inputs (attention's output, the second feed-forward matrix).

    Every rank has its share of the input, and gets the complete output or, under sequence parallelism, that of its
    tokens. The arguments are those of column_parallel_linear.
    """
    if parallel.size == 1:
        layer: nn.Module = Linear(in_features, out_features, kernels.linear, bias)
    else:
        from ctxlm_ds.parallel.megatron import RowParallelLinear

        layer = RowParallelLinear(in_features, out_features, kernels.linear, parallel, bias)
    declare(layer, weight=ParameterFacts(init, decays=True, split=COLUMNS, matrix=True))
    if bias:
        declare(layer, bias=ParameterFacts(ZEROS, decays=False))
    return layer


class ReplicatedLinear(Linear):
    """A linear layer that every tensor-parallel rank holds completely: the heads, and layers between the blocks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init: Init,
        kernels: KernelSet,
        activation: str | None = None,
        parallel: ParallelContext | None = None,
        optional: bool = False,
        bias: bool = True,
    ) -> None:
        """Make the layer; the arguments are those of column_parallel_linear.

        `parallel`: None if every rank has all tokens. `optional`: as in ParameterFacts.
        """
        super().__init__(in_features, out_features, _with_activation(kernels, kernels.linear, activation), bias)
        declare(self, weight=ParameterFacts(init, decays=True, optional=optional))
        if bias:
            declare(self, bias=ParameterFacts(ZEROS, decays=False, optional=optional))
        self.parallel = parallel or ParallelContext()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., i] to [..., o]."""
        if self.bias is None:
            (weight,) = share_parameters(self.parallel, self.weight)
            return self.kernel(x, weight, None)
        return self.kernel(x, *share_parameters(self.parallel, self.weight, self.bias))


def _with_activation(kernels: KernelSet, product: LinearKernel, activation: str | None) -> LinearKernel:
    if activation is None:
        return product
    return partial(kernels.bias_gelu, activation=activation, linear=product)


def column_product(kernels: KernelSet, parallel: ParallelContext, split_tokens: bool) -> ColumnParallelProduct:
    """Make the product of a layer split by its outputs, with the precision of the chosen linear kernel."""
    return ColumnParallelProduct(parallel, kernels.linear is float32_linear, split_tokens)


class VocabParallelEmbedding(nn.Module):
    """The table of word embeddings [v, h], split by rows; padding rows are 0 and never predicted.

    A list of layers calls only forward, so that hooks which gather the weight run.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, init: Init, kernels: KernelSet, parallel: ParallelContext
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.kernels = kernels
        self.num_rows = parallel.vocabulary_rows(vocab_size)
        self.first_row = self.num_rows * parallel.rank
        self.num_words = min(max(vocab_size - self.first_row, 0), self.num_rows)
        """Number of this rank's rows that belong to the vocabulary."""
        self.weight = self._allocate(vocab_size, hidden_size)
        declare(self, weight=ParameterFacts(init, decays=True, split=VOCABULARY, grows="vocabulary"))

    def _allocate(self, vocab_size: int, hidden_size: int) -> nn.Parameter:
        if self.parallel.size == 1:
            weight = torch.empty(self.num_rows, hidden_size)
            weight[self.num_words :] = 0.0
            return nn.Parameter(weight)
        from ctxlm_ds.parallel.megatron import VocabParallelTable

        return VocabParallelTable(vocab_size, hidden_size, self.parallel).weight

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        bias: Tensor | None = None,
        decode: bool = False,
        split_tokens: bool = False,
        z_loss: float = 0.0,
    ) -> Tensor | tuple[Tensor, ...]:
        """Look up ids [b, s], or `decode` vectors [..., h], or with labels compare decode(x) + bias [v / n] with them.

        Comparing returns the sum of the cross entropy, the right predictions and, with a z_loss, its sum
        (LinearCrossEntropy). Labels are ids of words, or IGNORE_LABEL, for the vectors in their order.
        """
        if labels is None:
            return self.decode(x, split_tokens) if decode else self.look_up(x)
        kernel = self.kernels.cross_entropy
        assert kernel is not None, "models/program.py asks only if there is one"
        in_float32 = self.kernels.linear is float32_linear
        compare = LinearCrossEntropy(kernel, self.parallel, self.num_words, in_float32, split_tokens, z_loss)
        return compare(x, self.weight, bias, labels)

    def look_up(self, ids: Tensor) -> Tensor:
        """Map ids [b, s] int to [b, s, h], or this rank's tokens [t / n, h] under sequence parallelism."""
        if self.parallel.size == 1:
            return F.embedding(ids, self.weight)
        own = ids - self.first_row
        elsewhere = (own < 0) | (own >= self.num_rows)
        found = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere[..., None], 0.0)
        if self.parallel.splits_tokens:
            return reduce_scatter_tokens(found.flatten(0, -2), self.parallel)
        return reduce_from_ranks(found, self.parallel)

    def decode(self, hidden: Tensor, split_tokens: bool = False) -> Tensor:
        """Map hidden [..., h] to scores of this rank's words [..., v / n]; padding rows get -inf.

        `split_tokens`: hidden holds this rank's tokens only, [t / n, h] -> [t, v / n].
        """
        kernel: LinearKernel = self.kernels.linear
        if self.parallel.size > 1:
            kernel = column_product(self.kernels, self.parallel, split_tokens)
        scores = kernel(hidden, self.weight, None)
        if self.num_words == self.num_rows:
            return scores
        # Detached: no loss has a gradient there, so the backward pass need not read all scores to clear it.
        scores.detach()[..., self.num_words :] = float("-inf")
        return scores


def declare_split(module: nn.Module, parallel: ParallelContext, **facts: ParameterFacts) -> None:
    """Declare parameters of which each rank holds a part, and mark them for DeepSpeed's norm of the gradients."""
    declare(module, **facts)
    if parallel.size > 1:
        from ctxlm_ds.parallel.megatron import mark_split

        for name, own in facts.items():
            mark_split(getattr(module, name), dim=int(own.split == COLUMNS))


class VocabularyBias(nn.Module):
    """The decoder's bias, one number per word [v], split like the table."""

    def __init__(self, vocab_size: int, parallel: ParallelContext, optional: bool = False) -> None:
        """Make the bias; `optional` as in ParameterFacts."""
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(parallel.vocabulary_rows(vocab_size)))
        facts = ParameterFacts(ZEROS, decays=False, split=VOCABULARY, grows="vocabulary", optional=optional)
        declare_split(self, parallel, bias=facts)

    def forward(self, scores: Tensor | None = None) -> Tensor:
        """Map scores [..., v / n] to logits; without scores, return a copy of the bias."""
        return self.bias.clone() if scores is None else scores + self.bias


EMBEDDINGS, ATTENTION, ATTENTION_OUTPUT, MLP_OUTPUT, CROSS_ATTENTION, CROSS_ATTENTION_OUTPUT, MLP_INNER = range(7)
"""Places of dropout in a layer."""


class HiddenDropout(nn.Module):
    """Dropout of hidden states; the dropped elements do not depend on how ranks split the tokens."""

    def __init__(self, p: float, kernels: KernelSet, parallel: ParallelContext) -> None:
        super().__init__()
        self.p = p
        self.kernel = kernels.dropout
        self.parallel = parallel

    def forward(self, x: Tensor, place: int) -> Tensor:
        """Drop from x [..., h]; `place` is the number of the place in the layer."""
        return self._drop(x, self.of(x, place))

    def of(self, x: Tensor, place: int) -> Drop | DropRuns | None:
        """Return what a kernel needs to drop from x [..., h] itself, or None if nothing is dropped."""
        if not self.training or self.p == 0.0:
            return None
        return self._of_tokens(x, self.parallel.dropout.key(place, x), self.parallel.splits_tokens)

    def _drop(self, x: Tensor, drop: Drop | DropRuns | None) -> Tensor:
        if isinstance(drop, list):
            return in_runs(lambda piece, its: (self.kernel(piece, *its),), drop, x)[0]
        return x if drop is None else self.kernel(x, *drop)

    def _of_tokens(self, x: Tensor, key: Tensor, split_tokens: bool) -> Drop | DropRuns:
        width = x.shape[-1]
        runs = token_runs(x.numel() // width, self.parallel, split_tokens)
        drops = [(slice(run.begin, run.end), Drop(self.p, key, run.first * width)) for run in runs]
        return drops if len(drops) > 1 else drops[0][1]


class InnerDropout(HiddenDropout):
    """Dropout inside a feed-forward layer; the dropped elements do not depend on how ranks split its width."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Drop from x [..., i / n], of which every rank has all tokens."""
        if not self.training or self.p == 0.0:
            return x
        size, rank, key = self.parallel.size, self.parallel.rank, self.parallel.dropout.key(MLP_INNER, x)
        if size == 1:
            return self._drop(x, self._of_tokens(x, key, split_tokens=False))
        runs = token_runs(x.shape[:-1].numel(), self.parallel, split_tokens=False)
        tokens = torch.cat([torch.arange(run.end - run.begin, device=x.device) + run.first for run in runs])
        return keyed_row_dropout(x, self.p, key, tokens.view(x.shape[:-1]) * size + rank)

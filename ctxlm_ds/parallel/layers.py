"""The layers that hold weight matrices, made here and nowhere else: the one place where tensor parallelism will enter.

Every rank holds whole layers today (the configuration refuses a larger tensor_parallel_size); the factories name how
each matrix is to be split. Parameters are allocated and left unset (models/initialize.py gives them their values),
with torch's default type and device of the place they are built in: the CPU, `meta`, or ZeRO-3's partitions.
Shape letters: i inputs, o outputs of a layer, v rows of the vocabulary, h width; `...` any leading dimensions.
"""

from __future__ import annotations

from torch import Tensor, nn

from ctxlm_ds.kernels.linear import LinearKernel


class Linear(nn.Linear):
    """torch.nn.Linear whose product (with bias, and activation if it has one) is computed by a kernel."""

    def __init__(self, in_features: int, out_features: int, kernel: LinearKernel) -> None:
        super().__init__(in_features, out_features)
        self.kernel = kernel

    def reset_parameters(self) -> None:
        """Leave the values unset."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., i] -> [..., o]."""
        return self.kernel(x, self.weight, self.bias)


class VocabParallelEmbedding(nn.Embedding):
    """The table of word embeddings [v, h], to be split by rows."""

    def __init__(self, vocab_size: int, hidden_size: int, kernel: LinearKernel) -> None:
        super().__init__(vocab_size, hidden_size)
        self.kernel = kernel

    def reset_parameters(self) -> None:
        """Leave the values unset."""

    def look_up(self, ids: Tensor) -> Tensor:
        """ids [...] int -> [..., h]."""
        return super().forward(ids)

    def decode(self, hidden: Tensor) -> Tensor:
        """hidden [..., h] -> scores of every word [..., v], with the same table."""
        return self.kernel(hidden, self.weight, None)


def column_parallel_linear(in_features: int, out_features: int, kernel: LinearKernel) -> Linear:
    """A linear layer to be split by its outputs (query/key/value, the first feed-forward matrix)."""
    return Linear(in_features, out_features, kernel)


def row_parallel_linear(in_features: int, out_features: int, kernel: LinearKernel) -> Linear:
    """A linear layer to be split by its inputs (attention's output, the second feed-forward matrix)."""
    return Linear(in_features, out_features, kernel)


def replicated_linear(in_features: int, out_features: int, kernel: LinearKernel) -> Linear:
    """A linear layer that every tensor-parallel rank holds whole (the heads)."""
    return Linear(in_features, out_features, kernel)

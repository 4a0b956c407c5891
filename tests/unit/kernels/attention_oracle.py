"""Rows of sequences, and attention of each sequence alone in float64, which every kernel must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionKernel, AttentionSpec, Sequences

SEQ_LENGTH, KEY_LENGTH, NUM_HEADS, HEAD_SIZE = 16, 11, 4, 8
PACKED_LENGTHS = [[5, 4, 6], [16], [3, 3], []]
PACKED_KEY_LENGTHS = [[2, 4, 3], [11], [1, 5], [4]]
SINGLE_LENGTHS = [[16], [7], [1], []]
SINGLE_KEY_LENGTHS = [[3], [11], [1], [4]]


def layout(lengths: list[list[int]], row_length: int = SEQ_LENGTH) -> tuple[Tensor, Tensor]:
    """sequence_ids [b, s] and sequence_starts [b, m + 1] of rows of these lengths."""
    slots = max(len(row) for row in lengths) + 1
    ids = torch.zeros(len(lengths), row_length, dtype=torch.int64)
    starts = torch.full((len(lengths), slots), row_length)
    for row, row_lengths in enumerate(lengths):
        begin = 0
        for sequence, length in enumerate(row_lengths):
            ids[row, begin : begin + length] = sequence + 1
            starts[row, sequence] = begin
            begin += length
        starts[row, len(row_lengths)] = begin
    return ids, starts


def sequences_of(spec: AttentionSpec) -> Sequences:
    """Rows that a layer of this kind may meet: full, short, of one position and empty."""
    queries = layout(PACKED_LENGTHS if spec.shares_rows else SINGLE_LENGTHS)
    if spec.ranked:
        ranks = torch.randint(0, 5, queries[0].shape, generator=torch.Generator().manual_seed(2))
        return Sequences(*queries, ranks=ranks)
    if not spec.cross:
        return Sequences(*queries)
    return Sequences(*queries, *layout(PACKED_KEY_LENGTHS if spec.shares_rows else SINGLE_KEY_LENGTHS, KEY_LENGTH))


def inputs_of(spec: AttentionSpec, row_biases: bool = False) -> list[Tensor]:
    """query, key, value, and if the spec says so a bias, [b, n, s, t] for `row_biases`, or distances; float64."""
    generator = torch.Generator().manual_seed(0)
    rows, length = len(PACKED_LENGTHS), KEY_LENGTH if spec.cross else SEQ_LENGTH
    shapes = [(rows, SEQ_LENGTH, NUM_HEADS, HEAD_SIZE)]
    shapes += [(rows, length, NUM_HEADS // 2 if spec.grouped else NUM_HEADS, HEAD_SIZE)] * 2
    if spec.by_distance:
        shapes.append((NUM_HEADS, 2 * SEQ_LENGTH - 1))
    elif spec.bias:
        shapes.append((*([rows] if row_biases else []), NUM_HEADS, SEQ_LENGTH, length))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def square_of(distances: Tensor) -> Tensor:
    """The bias [n, s, s] of pairs that has the numbers of distances [n, 2 s - 1]."""
    places = torch.arange(SEQ_LENGTH)
    return distances[:, places - places[:, None] + SEQ_LENGTH - 1]


def call_of(spec: AttentionSpec, sequences: Sequences, others: list[Tensor], p: float = 0.0) -> AttentionCall:
    """A call with what inputs_of returned after the value."""
    if spec.by_distance:
        return AttentionCall(sequences, p, distances=others[0])
    return AttentionCall(sequences, p, *others)


class Oracle:
    """Each sequence attended by itself, one head and one position at a time."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        sequences, bias = call.sequences, call.bias
        if call.distances is not None:
            bias = square_of(call.distances)
        ids, key_ids = sequences.ids, sequences.ids if sequences.key_ids is None else sequences.key_ids
        output = torch.zeros_like(query)
        for row, row_ids in enumerate(ids):
            for sequence in range(1, int(row_ids.max()) + 1):
                here = (row_ids == sequence).nonzero()[:, 0]
                there = (key_ids[row] == sequence).nonzero()[:, 0]
                for i, position in enumerate(here):
                    seen = there[self._seen_by(i, len(there))]
                    if sequences.ranks is not None:
                        seen = seen[sequences.ranks[row, seen] <= sequences.ranks[row, position]]
                    added = 0.0 if bias is None else (bias[row] if bias.ndim == 4 else bias)[:, position, seen]
                    output[row, position] = self._one(query[row, position], key[row, seen], value[row, seen], added)
        return output

    def _seen_by(self, i: int, count: int) -> slice:
        """The places in its sequence that place i sees."""
        left = 0 if self.spec.window is None else max(0, i - self.spec.window)
        right = count if self.spec.window is None else i + self.spec.window + 1
        return slice(left, i + 1 if self.spec.causal else right)

    def _one(self, query: Tensor, key: Tensor, value: Tensor, added: Tensor | float) -> Tensor:
        """[n, d], [q, k, d] twice -> [n, d]."""
        scale = 1 / HEAD_SIZE**0.5 if self.spec.scale is None else self.spec.scale
        group = len(query) // key.shape[1]
        key, value = (torch.stack([x[:, head // group] for head in range(len(query))]) for x in (key, value))
        scores = (key @ query[:, :, None])[..., 0] * scale + added
        return (torch.softmax(scores, dim=-1)[:, None] @ value)[:, 0]


def values_and_gradients(
    kernel: AttentionKernel, inputs: list[Tensor], sequences: Sequences, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Context at real positions and the gradients of the inputs, for a loss that reads real positions only."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    query, key, value, *others = leaves
    context = kernel(query, key, value, call_of(kernel.spec, sequences, others))  # type: ignore[attr-defined]
    assert context.shape == query.shape and context.dtype == dtype
    real = (sequences.ids > 0)[:, :, None, None].to(context.device)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(context.shape, generator=generator, dtype=torch.float64).to(context)
    torch.where(real, context, 0.0).backward(upstream)
    gradients = [leaf.grad.double().cpu() for leaf in leaves if leaf.grad is not None]
    return [torch.where(real, context, 0.0).detach().double().cpu(), *gradients]


def compare(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Equal within an absolute tolerance, value by value."""
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)

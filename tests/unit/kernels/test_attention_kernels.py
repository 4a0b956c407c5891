"""Attention kernels against each sequence attended alone in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.attention import (
    AttentionKernel,
    SdpaAttention,
    cumulative_lengths,
    reference_attention,
    varlen_attention,
    why_varlen_cannot_run,
)

SEQ_LENGTH, NUM_HEADS, HEAD_SIZE = 16, 2, 8
PACKED_LENGTHS = [[5, 4, 6], [16], [3, 3], []]
SINGLE_LENGTHS = [[16], [7], [1], []]


def layout(lengths: list[list[int]]) -> tuple[Tensor, Tensor]:
    """sequence_ids [b, s] and sequence_starts [b, m + 1] of rows of these lengths."""
    slots = max(len(row) for row in lengths) + 1
    ids = torch.zeros(len(lengths), SEQ_LENGTH, dtype=torch.int64)
    starts = torch.full((len(lengths), slots), SEQ_LENGTH)
    for row, row_lengths in enumerate(lengths):
        begin = 0
        for sequence, length in enumerate(row_lengths):
            ids[row, begin : begin + length] = sequence + 1
            starts[row, sequence] = begin
            begin += length
        starts[row, len(row_lengths)] = begin
    return ids, starts


def each_sequence_alone(
    query: Tensor, key: Tensor, value: Tensor, sequence_ids: Tensor, causal: bool = False
) -> Tensor:
    """[b, s, n, d]: every sequence attended by itself, position by position if `causal`; zeros at padding."""
    output = torch.zeros_like(query)
    for row, ids in enumerate(sequence_ids):
        for sequence in range(1, int(ids.max()) + 1):
            here = ids == sequence
            q, k, v = (x[row, here].transpose(0, 1) for x in (query, key, value))
            if causal:
                steps = [one_by_one(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1]) for i in range(q.shape[1])]
                output[row, here] = torch.cat(steps, dim=1).transpose(0, 1)
            else:
                output[row, here] = one_by_one(q, k, v).transpose(0, 1)
    return output


def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[n, q, d], [n, k, d] twice -> [n, q, d]."""
    return torch.softmax(query @ key.transpose(1, 2) / HEAD_SIZE**0.5, dim=-1) @ value


def values_and_gradients(
    attend: AttentionKernel, qkv: Tensor, lengths: list[list[int]], dtype: torch.dtype
) -> list[Tensor]:
    """Context at real positions and the gradient of qkv, for a loss that reads real positions only."""
    ids, starts = layout(lengths)
    leaf = qkv.to(dtype, copy=True).requires_grad_()
    context = attend(*leaf.unbind(2), ids, starts, 0.0)
    real = (ids > 0)[:, :, None, None]
    context = torch.where(real, context, 0.0)
    generator = torch.Generator().manual_seed(1)
    context.backward(torch.randn(context.shape, generator=generator, dtype=torch.float64).to(dtype))
    assert leaf.grad is not None
    return [context.detach().double(), leaf.grad.double()]


def oracle(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, starts: Tensor, dropout_p: float) -> Tensor:
    return each_sequence_alone(query, key, value, ids)


def causal_oracle(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, starts: Tensor, dropout_p: float) -> Tensor:
    return each_sequence_alone(query, key, value, ids, causal=True)


CAUSAL_REFERENCE = partial(reference_attention, causal=True)


@pytest.fixture
def qkv() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, SEQ_LENGTH, 3, NUM_HEADS, HEAD_SIZE, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kernel", "lengths", "dtype", "tolerance"),
    [
        (reference_attention, PACKED_LENGTHS, torch.float64, 1e-12),
        (reference_attention, PACKED_LENGTHS, torch.float32, 1e-5),
        (SdpaAttention(packing=True), PACKED_LENGTHS, torch.float64, 1e-12),
        (SdpaAttention(packing=True), PACKED_LENGTHS, torch.float32, 1e-5),
        (SdpaAttention(packing=False), SINGLE_LENGTHS, torch.float64, 1e-12),
        (SdpaAttention(packing=False), SINGLE_LENGTHS, torch.float32, 1e-5),
        (SdpaAttention(packing=True), PACKED_LENGTHS, torch.bfloat16, 6e-2),
        (SdpaAttention(packing=True, compute_in_float32=True), PACKED_LENGTHS, torch.bfloat16, 3e-2),
        (SdpaAttention(packing=False, compute_in_float32=True), SINGLE_LENGTHS, torch.bfloat16, 3e-2),
    ],
)
def test_values_and_gradients(
    kernel: AttentionKernel, lengths: list[list[int]], dtype: torch.dtype, tolerance: float, qkv: Tensor
) -> None:
    qkv = qkv.to(dtype).double()
    expected = values_and_gradients(oracle, qkv, lengths, torch.float64)
    actual = values_and_gradients(kernel, qkv, lengths, dtype)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("kernel", "lengths", "dtype", "tolerance"),
    [
        (CAUSAL_REFERENCE, PACKED_LENGTHS, torch.float64, 1e-12),
        (SdpaAttention(packing=True, causal=True), PACKED_LENGTHS, torch.float64, 1e-12),
        (SdpaAttention(packing=True, causal=True), SINGLE_LENGTHS, torch.float32, 1e-5),
        (SdpaAttention(packing=False, causal=True), SINGLE_LENGTHS, torch.float64, 1e-12),
        (SdpaAttention(packing=False, causal=True), SINGLE_LENGTHS, torch.float32, 1e-5),
        (SdpaAttention(packing=True, compute_in_float32=True, causal=True), PACKED_LENGTHS, torch.bfloat16, 3e-2),
    ],
)
def test_causal_values_and_gradients(
    kernel: AttentionKernel, lengths: list[list[int]], dtype: torch.dtype, tolerance: float, qkv: Tensor
) -> None:
    qkv = qkv.to(dtype).double()
    expected = values_and_gradients(causal_oracle, qkv, lengths, torch.float64)
    actual = values_and_gradients(kernel, qkv, lengths, dtype)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "kernel",
    [
        reference_attention,
        SdpaAttention(packing=True),
        SdpaAttention(packing=False),
        CAUSAL_REFERENCE,
        SdpaAttention(packing=True, causal=True),
        SdpaAttention(packing=False, causal=True),
    ],
)
def test_a_row_of_padding_alone_gives_no_nan(kernel: AttentionKernel, qkv: Tensor) -> None:
    ids, starts = layout([[]] * 4)
    leaf = qkv.float().requires_grad_()
    context = kernel(*leaf.unbind(2), ids, starts, 0.0)
    context.sum().backward()
    assert leaf.grad is not None
    assert context.isfinite().all() and leaf.grad.isfinite().all()


def test_reference_dropout_is_dropout_of_the_probabilities(qkv: Tensor) -> None:
    ids, starts = layout(PACKED_LENGTHS)
    query, key, value = qkv.unbind(2)
    torch.manual_seed(5)
    actual = reference_attention(query, key, value, ids, starts, 0.3)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    visible = ids[:, None, :, None] == ids[:, None, None, :]
    scores = (q @ k.transpose(-1, -2) / HEAD_SIZE**0.5).masked_fill(~visible, float("-inf"))
    torch.manual_seed(5)
    expected = (F.dropout(torch.softmax(scores, -1), 0.3) @ v).transpose(1, 2)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_sdpa_dropout_keeps_the_mean(qkv: Tensor) -> None:
    ids, starts = layout(PACKED_LENGTHS)
    kernel = SdpaAttention(packing=True)
    without = kernel(*qkv.unbind(2), ids, starts, 0.0)
    torch.manual_seed(0)
    drawn = torch.stack([kernel(*qkv.unbind(2), ids, starts, 0.2) for _ in range(400)])
    assert drawn.std(0).max() > 0.1
    torch.testing.assert_close(drawn.mean(0), without, rtol=0, atol=0.25)


def test_cumulative_lengths_bound_every_sequence_and_every_padding() -> None:
    ids, starts = layout(PACKED_LENGTHS)
    bounds = cumulative_lengths(starts, SEQ_LENGTH)
    assert bounds.dtype == torch.int32
    assert bounds[0] == 0 and bounds[-1] == ids.numel()
    pieces = [(a, b) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True) if b > a]
    assert pieces == [(0, 5), (5, 9), (9, 15), (15, 16), (16, 32), (32, 35), (35, 38), (38, 48), (48, 64)]
    assert all(ids.flatten()[a:b].unique().numel() == 1 for a, b in pieces)


def per_segment_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, window_size: tuple[int, int],
) -> Tensor:
    """What torch documents of varlen_attn, segment by segment, for machines without CUDA."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    lengths = cu_seq_q.diff().tolist()
    assert sum(lengths) == len(query) and max(lengths) <= min(max_q, max_k)
    segments = [x.split(lengths) for x in (query, key, value)]
    attended = []
    for q, k, v in zip(*segments, strict=True):
        scores = torch.einsum("qnd,knd->nqk", q, k) / HEAD_SIZE**0.5
        if window_size == (-1, 0):
            scores = scores.masked_fill(~torch.ones(len(q), len(q), dtype=torch.bool).tril(), float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        attended.append(torch.einsum("nqk,knd->qnd", weights, v))
    return torch.cat(attended)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [PACKED_LENGTHS, SINGLE_LENGTHS])
def test_varlen_flattens_rows_so_that_sequences_stay_apart(
    lengths: list[list[int]], causal: bool, qkv: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", per_segment_attention)
    expected = values_and_gradients(causal_oracle if causal else oracle, qkv, lengths, torch.float64)
    actual = values_and_gradients(partial(varlen_attention, causal=causal), qkv, lengths, torch.float64)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.skipif(
    why_varlen_cannot_run("cuda", torch.bfloat16, 0.0, HEAD_SIZE) is not None, reason="needs an Ampere or later GPU"
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [PACKED_LENGTHS, SINGLE_LENGTHS])
def test_varlen_on_cuda(lengths: list[list[int]], causal: bool, qkv: Tensor) -> None:
    def on_cuda(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, starts: Tensor, dropout_p: float) -> Tensor:
        tensors = (x.cuda() for x in (query, key, value, ids, starts))
        return varlen_attention(*tensors, dropout_p, causal=causal).cpu()

    qkv = qkv.bfloat16().double()
    expected = values_and_gradients(causal_oracle if causal else oracle, qkv, lengths, torch.float64)
    actual = values_and_gradients(on_cuda, qkv, lengths, torch.bfloat16)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=6e-2)


def test_varlen_refuses_dropout(qkv: Tensor) -> None:
    with pytest.raises(KernelError, match=r"`varlen` has no attention dropout, but it is 0\.1"):
        varlen_attention(*qkv.unbind(2), *layout(PACKED_LENGTHS), 0.1)

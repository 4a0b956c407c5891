"""FlashAttention over packed rows: the arguments everywhere, the results on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels.attention import (
    VarlenAttention,
    cumulative_lengths,
    use_flash3,
    why_flash3_cannot_run,
    why_varlen_cannot_run,
)
from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionKernel, AttentionSpec, Sequences
from ctxlm_ds.kernels.implementation import Need
from tests.unit.kernels.attention_oracle import (
    HEAD_SIZE,
    PACKED_LENGTHS,
    SEQ_LENGTH,
    Oracle,
    compare,
    inputs_of,
    layout,
    sequences_of,
    values_and_gradients,
)
from tests.unit.kernels.test_attention import PACKED, every_spec, name_of


def test_cumulative_lengths_bound_every_sequence_and_every_padding() -> None:
    ids, starts = layout(PACKED_LENGTHS)
    bounds = cumulative_lengths(starts, SEQ_LENGTH)
    assert bounds.dtype == torch.int32
    assert bounds[0] == 0 and bounds[-1] == ids.numel()
    pieces = [(a, b) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True) if b > a]
    assert pieces == [(0, 5), (5, 9), (9, 15), (15, 16), (16, 32), (32, 35), (35, 38), (38, 48), (48, 64)]
    assert all(ids.flatten()[a:b].unique().numel() == 1 for a, b in pieces)


def segment_by_segment(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """What torch documents of varlen_attn, for machines without CUDA; zeros if a segment has no key."""
    lengths, key_lengths = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert sum(lengths) == len(query) and max(lengths) <= max_q and max(key_lengths) <= max_k
    assert enable_gqa == (query.shape[1] != key.shape[1])
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    attended, (left, right) = [], window_size
    segments = zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths), strict=True)
    for q, k, v in segments:
        scores = torch.einsum("qnd,knd->nqk", q, k) * (HEAD_SIZE**-0.5 if scale is None else scale)
        steps = torch.arange(len(k)) - torch.arange(len(q))[:, None]
        far = (steps > right if right >= 0 else steps > len(k)) | (steps < -left if left >= 0 else steps < -len(q))
        weights = torch.softmax(scores.masked_fill(far, float("-inf")), dim=-1)
        attended.append(torch.einsum("nqk,knd->qnd", weights, v))
    return torch.cat(attended)


VARLEN_SPECS = [spec for spec in every_spec() if not spec.bias]


@pytest.mark.parametrize("spec", VARLEN_SPECS, ids=name_of)
def test_varlen_flattens_rows_so_that_sequences_stay_apart(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", segment_by_segment)
    inputs, sequences = inputs_of(spec), sequences_of(spec)
    expected = values_and_gradients(Oracle(spec), inputs, sequences)
    compare(values_and_gradients(VarlenAttention(spec), inputs, sequences), expected, 1e-11)


@pytest.mark.skipif(
    why_varlen_cannot_run(Need(PACKED, "cuda", torch.bfloat16)) is not None, reason="needs an Ampere or later GPU"
)
@pytest.mark.parametrize("spec", VARLEN_SPECS, ids=name_of)
def test_varlen_on_cuda(spec: AttentionSpec) -> None:
    def on_cuda(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        there = Sequences(*(None if x is None else x.cuda() for x in call.sequences))  # type: ignore[arg-type]
        return VarlenAttention(spec)(query.cuda(), key.cuda(), value.cuda(), call._replace(sequences=there)).cpu()

    kernel: AttentionKernel = on_cuda
    inputs, sequences = [x.bfloat16().double() for x in inputs_of(spec)], sequences_of(spec)
    expected = values_and_gradients(Oracle(spec), inputs, sequences)
    compare(values_and_gradients(kernel, inputs, sequences, torch.bfloat16), expected, 6e-2)


def test_varlen_refuses_what_it_cannot_compute() -> None:
    query, key, value, bias = inputs_of(AttentionSpec(HEAD_SIZE, bias=True))
    with pytest.raises(KernelError, match="`varlen` adds no bias"):
        VarlenAttention(PACKED)(query, key, value, AttentionCall(sequences_of(PACKED), 0.0, bias))


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, key_bounds: Tensor, *arguments: object, **named: object
) -> tuple[Tensor, ...]:
    """torch's operation by segment_by_segment; the arguments after the bounds are those of its schema."""
    longest, key_longest, p, is_causal, debug = arguments
    left, right = named["window_size_left"], named["window_size_right"]
    assert p == 0.25 and debug is False and is_causal == ((left, right) == (-1, 0))
    grouped = query.shape[1] != key.shape[1]
    context = segment_by_segment(
        query, key, value, bounds, key_bounds, longest, key_longest,  # type: ignore[arg-type]
        scale=named["scale"], window_size=(left, right), enable_gqa=grouped,  # type: ignore[arg-type]
    )  # fmt: skip
    return context, query, query, query, query


@pytest.mark.parametrize("spec", VARLEN_SPECS, ids=name_of)
def test_dropout_calls_torchs_operation_with_the_same_arguments(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    inputs, sequences = inputs_of(spec), sequences_of(spec)
    leaves = [x.clone().requires_grad_() for x in inputs]
    context = VarlenAttention(spec)(leaves[0], leaves[1], leaves[2], AttentionCall(sequences, 0.25))
    expected = Oracle(spec)(inputs[0], inputs[1], inputs[2], AttentionCall(sequences))
    real = (sequences.ids > 0)[:, :, None, None]
    compare([torch.where(real, context, 0.0).detach()], [expected], 1e-11)


@pytest.mark.parametrize("spec", VARLEN_SPECS[:8], ids=name_of)
def test_torchs_operation_takes_these_arguments_and_has_a_gradient(spec: AttentionSpec) -> None:
    query, key, value = (x.to("meta", torch.bfloat16).requires_grad_() for x in inputs_of(spec))
    sequences = Sequences(*(None if x is None else x.to("meta") for x in sequences_of(spec)))  # type: ignore[arg-type]
    context = VarlenAttention(spec)(query, key, value, AttentionCall(sequences, 0.1))
    assert context.shape == query.shape
    context.sum().backward()
    assert query.grad is not None and key.grad is not None and key.grad.shape == key.shape


@pytest.mark.parametrize(
    ("settings", "capability", "installed", "reason"),
    [
        ({}, (9, 0), True, None),
        ({}, (9, 0), False, "flash_attn_interface"),
        ({}, (8, 0), True, "Hopper"),
        ({}, (10, 0), True, "Hopper"),
        (dict(dropout=0.1), (9, 0), True, "no dropout"),
        (dict(bias=True), (9, 0), True, "adds no bias"),
    ],
)
def test_what_flash3_needs(
    settings: dict[str, Any], capability: tuple[int, int], installed: bool, reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    need = Need(AttentionSpec(64, **settings), "cuda", torch.bfloat16)
    problem = why_flash3_cannot_run(need)
    assert problem is None if reason is None else reason in (problem or "")


def test_flash3_is_activated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    active: list[str] = []
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", active.append)
    monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: active[-1] if active else None)
    for _ in range(2):
        assert use_flash3(Need(PACKED, "cuda", torch.bfloat16)) == VarlenAttention(PACKED)
    assert active == ["FA3"]

"""Attention kernels against each sequence attended alone in float64, for every kind of layer."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.kernels.attention import ReferenceAttention, SdpaAttention
from ctxlm_ds.kernels.attention_bmm import BmmAttention
from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionSpec, ProbabilityKeys, Sequences
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.dropout import keyed_dropout
from tests.unit.kernels.attention_oracle import (
    HEAD_SIZE,
    NUM_HEADS,
    SEQ_LENGTH,
    Oracle,
    call_of,
    compare,
    inputs_of,
    layout,
    sequences_of,
    values_and_gradients,
)

PLAIN = AttentionSpec(HEAD_SIZE)
PACKED = AttentionSpec(HEAD_SIZE, shares_rows=True)
CAUSAL = AttentionSpec(HEAD_SIZE, causal=True)
PACKED_CAUSAL = AttentionSpec(HEAD_SIZE, causal=True, shares_rows=True)
FAMILIES = [PLAIN, PACKED, CAUSAL, PACKED_CAUSAL]


def every_spec() -> list[AttentionSpec]:
    """Every kind of layer without dropout."""
    orders = [dict(causal=causal, window=window) for causal in (False, True) for window in (None, 3)]
    extras = product([False, True], [False, True], [False, True], [None, 1.0])
    return [
        AttentionSpec(HEAD_SIZE, shares_rows=shares, grouped=grouped, bias=bias, scale=scale, **order)  # type: ignore[arg-type]
        for shares, grouped, bias, scale in extras
        for order in [*orders, dict(cross=True)]
    ]


def ranked_specs() -> list[AttentionSpec]:
    """Layers whose rows say what a position sees."""
    settings = product([False, True], [False, True], [False, True])
    return [AttentionSpec(HEAD_SIZE, ranked=True, shares_rows=s, bias=b, causal=c) for s, b, c in settings]


def name_of(value: Any) -> str | None:
    """What a case is called: the settings that differ from the default."""
    if not isinstance(value, AttentionSpec):
        return None
    settings = ("causal", "shares_rows", "window", "grouped", "bias", "cross", "scale", "ranked", "by_distance")
    return "-".join(name for name in settings if getattr(value, name)) or "plain"


@pytest.mark.parametrize("spec", [*every_spec(), *ranked_specs()], ids=name_of)
def test_values_and_gradients_of_every_kind(spec: AttentionSpec) -> None:
    inputs, sequences = inputs_of(spec), sequences_of(spec)
    expected = values_and_gradients(Oracle(spec), inputs, sequences)
    reference = values_and_gradients(ReferenceAttention(spec), inputs, sequences)
    compare(reference, expected, 1e-11)
    compare(values_and_gradients(SdpaAttention(spec), inputs, sequences), reference, 1e-11)
    in_float32 = [values_and_gradients(kind(spec), inputs, sequences, torch.float32) for kind in BOTH]
    compare(in_float32[0], expected, 2e-5)
    compare(in_float32[1], expected, 2e-5)


BOTH = (ReferenceAttention, SdpaAttention)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("shares_rows", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_a_bias_for_each_row(kind: type, shares_rows: bool, cross: bool) -> None:
    spec = AttentionSpec(HEAD_SIZE, shares_rows=shares_rows, cross=cross, bias=True)
    inputs, sequences = inputs_of(spec, row_biases=True), sequences_of(spec)
    expected = values_and_gradients(Oracle(spec), inputs, sequences)
    compare(values_and_gradients(kind(spec), inputs, sequences), expected, 1e-11)


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize(
    "spec", [*FAMILIES, *(AttentionSpec(HEAD_SIZE, bias=bias, window=3, grouped=True) for bias in (True, False))],
    ids=name_of,
)  # fmt: skip
def test_in_bf16(spec: AttentionSpec, in_float32: bool) -> None:
    """As bmm, which adds no bias for pairs."""
    inputs, sequences = [x.bfloat16().double() for x in inputs_of(spec)], sequences_of(spec)
    expected = values_and_gradients(Oracle(spec), inputs, sequences)
    for kind in (SdpaAttention, BmmAttention)[: 1 if spec.bias else 2]:
        actual = values_and_gradients(kind(spec, in_float32), inputs, sequences, torch.bfloat16)
        compare(actual, expected, 3e-2 if in_float32 else 6e-2)


class Spy:
    """Takes the place of torch's function and keeps what it was called with."""

    def __init__(self) -> None:
        self.attend = F.scaled_dot_product_attention
        self.mask: Tensor | None = None
        self.arguments: dict[str, Any] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, **rest: Any) -> Tensor:
        self.mask, self.arguments = attn_mask, rest
        return self.attend(query, key, value, attn_mask=attn_mask, **rest)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return spy


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (PLAIN, (4, 1, 1, 16)),
        (PACKED, (4, 1, 16, 16)),
        (CAUSAL, None),
        (PACKED_CAUSAL, (4, 1, 16, 16)),
        (AttentionSpec(HEAD_SIZE, causal=True, window=2), (16, 16)),
        (AttentionSpec(HEAD_SIZE, window=2), (4, 1, 16, 16)),
        (AttentionSpec(HEAD_SIZE, cross=True), (4, 1, 1, 11)),
        (AttentionSpec(HEAD_SIZE, cross=True, shares_rows=True), (4, 1, 16, 11)),
        (AttentionSpec(HEAD_SIZE, causal=True, bias=True), (1, 4, 16, 16)),
        (AttentionSpec(HEAD_SIZE, bias=True), (4, 4, 16, 16)),
    ],
    ids=name_of,
)
def test_sdpa_gets_the_smallest_mask(spec: AttentionSpec, shape: tuple[int, ...] | None, spy: Spy) -> None:
    query, key, value, *bias = inputs_of(spec)
    SdpaAttention(spec)(query, key, value, AttentionCall(sequences_of(spec), 0.0, *bias))
    assert shape == (None if spy.mask is None else spy.mask.shape)
    assert spy.mask is None or spy.mask.dtype == (torch.float64 if spec.bias else torch.bool)
    assert spy.arguments == dict(dropout_p=0.0, is_causal=shape is None, scale=None, enable_gqa=False)


def present_masks(ids: Tensor) -> dict[AttentionSpec, Tensor | None]:
    """The masks of BERT, RoBERTa, GPT and GPT-2 in runs that exist; other ones would change their losses."""
    together = ids[:, None, :, None] == ids[:, None, None, :]
    return {
        PLAIN: (ids == ids[:, :1])[:, None, None, :],
        PACKED: together,
        CAUSAL: None,
        PACKED_CAUSAL: together & torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).tril(),
    }


@pytest.mark.parametrize("spec", FAMILIES, ids=name_of)
def test_sdpa_is_called_as_in_runs_that_exist(spec: AttentionSpec, spy: Spy) -> None:
    query, key, value = (x.float() for x in inputs_of(spec))
    sequences = sequences_of(spec)
    actual = SdpaAttention(spec)(query, key, value, AttentionCall(sequences))
    mask = present_masks(sequences.ids)[spec]
    heads = (x.transpose(1, 2) for x in (query, key, value))
    expected = spy.attend(*heads, attn_mask=mask, dropout_p=0.0, is_causal=mask is None)
    assert torch.equal(actual, expected.transpose(1, 2))
    assert mask is spy.mask is None or (spy.mask is not None and mask is not None and torch.equal(spy.mask, mask))


LONG = [[800, 400], [40, 1200]]
"""Lengths of the sequences of rows of more positions than attention_bmm.LONG_ROW."""


@pytest.mark.parametrize(
    "spec",
    [
        PACKED, PACKED_CAUSAL, AttentionSpec(HEAD_SIZE, window=20), AttentionSpec(HEAD_SIZE, causal=True, window=20),
        AttentionSpec(HEAD_SIZE, shares_rows=True, window=20, grouped=True),
        AttentionSpec(HEAD_SIZE, shares_rows=True, cross=True),
    ],
    ids=name_of,
)  # fmt: skip
def test_long_rows_on_a_cpu_need_no_square(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` neither makes a mask of s times t nor keeps so many numbers, and computes what `reference` does."""
    layouts = layout(LONG if spec.shares_rows else [[1250], [1200]], 1280)
    sequences = Sequences(*layouts, *(layouts if spec.cross else ()))
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 1280, heads, HEAD_SIZE) for heads in (2, *([1, 1] if spec.grouped else [2, 2]))]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    expected = values_and_gradients(ReferenceAttention(spec), inputs, sequences)
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        actual = values_and_gradients(
            KernelSet({}, "cpu", torch.float32).attention(spec), inputs, sequences, torch.float32
        )
    compare(actual, expected, 5e-5)
    seen = 1280 * (256 + 40) if spec.window else 0
    assert sum(kept) <= 10 * inputs[0].numel() + 2 * 2 * seen


@pytest.mark.parametrize("spec", every_spec()[:20], ids=name_of)
def test_rows_of_padding_alone_give_no_nan(spec: AttentionSpec) -> None:
    """Queries or keys of a row are padding alone: values and gradients are finite, also those of bmm."""
    inputs, (ids, starts, key_ids, key_starts, _) = inputs_of(spec), sequences_of(spec)
    empty, empty_starts = torch.zeros_like(ids), torch.full_like(starts, SEQ_LENGTH)
    cases = [Sequences(empty, empty_starts, key_ids, key_starts)]
    if key_ids is not None:
        cases.append(Sequences(ids, starts, torch.zeros_like(key_ids), key_starts))
        cases.append(Sequences(empty, empty_starts, torch.ones_like(key_ids), key_starts))
    for kind, sequences in product((*BOTH, BmmAttention)[: 2 if spec.bias else 3], cases):
        leaves = [x.float().requires_grad_() for x in inputs]
        query, key, value, *others = leaves
        context = kind(spec)(query, key, value, call_of(spec, sequences, others))
        context.sum().backward()
        assert all(x is not None and x.isfinite().all() for x in (context, *(leaf.grad for leaf in leaves)))


def test_reference_dropout_is_dropout_of_the_probabilities() -> None:
    query, key, value = inputs_of(PACKED)
    sequences = sequences_of(PACKED)
    keys = ProbabilityKeys(torch.tensor(5), 0, NUM_HEADS)
    actual = ReferenceAttention(PACKED)(query, key, value, AttentionCall(sequences, 0.3, keys=keys))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    visible = sequences.ids[:, None, :, None] == sequences.ids[:, None, None, :]
    scores = (q @ k.transpose(-1, -2) / HEAD_SIZE**0.5).masked_fill(~visible, float("-inf"))
    # Rows of 16 keys are whole words of the hash.
    expected = (keyed_dropout(torch.softmax(scores, -1), 0.3, torch.tensor(5)) @ v).transpose(1, 2)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_sdpa_dropout_keeps_the_mean() -> None:
    inputs, sequences = inputs_of(PACKED), sequences_of(PACKED)
    kernel = SdpaAttention(PACKED)
    without = kernel(*inputs, AttentionCall(sequences))
    torch.manual_seed(0)
    drawn = torch.stack([kernel(*inputs, AttentionCall(sequences, 0.2)) for _ in range(400)])
    assert drawn.std(0).max() > 0.1
    torch.testing.assert_close(drawn.mean(0), without, rtol=0, atol=0.25)

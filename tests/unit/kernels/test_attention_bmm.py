"""Products of matrices with a compiled softmax: every kind of layer, dropout by key, shares of heads, torch.compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels import attention_bmm
from ctxlm_ds.kernels.attention import ReferenceAttention
from ctxlm_ds.kernels.attention_bmm import BmmAttention, spans_of, why_bmm_cannot_run
from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionSpec, ProbabilityKeys, Sequences
from ctxlm_ds.kernels.implementation import Need, why_compiled_cannot_run
from tests.unit.kernels.attention_oracle import (
    HEAD_SIZE,
    NUM_HEADS,
    PACKED_LENGTHS,
    SEQ_LENGTH,
    Oracle,
    call_of,
    compare,
    inputs_of,
    layout,
    sequences_of,
    square_of,
    values_and_gradients,
)
from tests.unit.kernels.test_attention import every_spec, name_of, ranked_specs

SPECS = [
    *(spec for spec in every_spec() if not spec.bias),
    *(replace(spec, by_distance=True) for spec in every_spec() if spec.bias and not spec.cross),
    *(replace(spec, by_distance=spec.bias) for spec in ranked_specs()),
]
PLAIN, PACKED = AttentionSpec(HEAD_SIZE), AttentionSpec(HEAD_SIZE, shares_rows=True)
KEY = torch.tensor(0x0123456789ABCDEF)


@pytest.fixture(params=["one piece", "many pieces", "long rows"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and queries all together, cut, and cut as in long rows, of which no probabilities are stored."""
    if request.param != "one piece":
        monkeypatch.setattr(attention_bmm, "CACHED_SCORES", 300)
        monkeypatch.setattr(attention_bmm, "TILE_QUERIES", 5)
    if request.param == "long rows":
        monkeypatch.setattr(attention_bmm, "LONG_ROW", 4)
        monkeypatch.setattr(attention_bmm, "STORED_SCORES", 0)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_values_and_gradients_of_every_kind(spec: AttentionSpec) -> None:
    inputs, sequences = inputs_of(spec), sequences_of(spec)
    expected = values_and_gradients(Oracle(spec), inputs, sequences)
    compare(values_and_gradients(BmmAttention(spec), inputs, sequences), expected, 1e-11)
    compare(values_and_gradients(BmmAttention(spec), inputs, sequences, torch.float32), expected, 2e-5)


def run(
    kernel: BmmAttention | ReferenceAttention, inputs: list[Tensor], sequences: Sequences, p: float,
    keys: ProbabilityKeys | None = None,
) -> list[Tensor]:  # fmt: skip
    """Context at real positions and gradients, with dropout."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    call = call_of(kernel.spec, sequences, leaves[3:], p)._replace(keys=keys)
    if call.distances is not None and not isinstance(kernel, BmmAttention):
        call = call._replace(bias=square_of(call.distances), distances=None)
    context = kernel(leaves[0], leaves[1], leaves[2], call)
    context = torch.where((sequences.ids > 0)[:, :, None, None], context, 0.0)
    (context * torch.linspace(-1, 1, context.numel(), dtype=context.dtype).view_as(context)).sum().backward()
    return [context.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_dropout_drops_the_probabilities_that_reference_drops(spec: AttentionSpec) -> None:
    inputs, sequences = inputs_of(spec), sequences_of(spec)
    keys = ProbabilityKeys(KEY, 3, 11)
    expected = run(ReferenceAttention(spec), inputs, sequences, 0.3, keys)
    compare(run(BmmAttention(spec), inputs, sequences, 0.3, keys), expected, 1e-11)
    without = run(BmmAttention(spec), inputs, sequences, 0.0)
    assert not torch.allclose(expected[0], without[0])


@pytest.mark.parametrize("kind", [BmmAttention, ReferenceAttention])
def test_shares_of_the_heads_drop_what_all_heads_drop(kind: type) -> None:
    inputs, sequences, half = inputs_of(PACKED), sequences_of(PACKED), NUM_HEADS // 2
    whole = run(kind(PACKED), inputs, sequences, 0.4, ProbabilityKeys(KEY, 0, NUM_HEADS))
    for first in (0, half):
        share = [x[:, :, first : first + half] for x in inputs]
        got = kind(PACKED)(*share, AttentionCall(sequences, 0.4, keys=ProbabilityKeys(KEY, first, NUM_HEADS)))
        real = (sequences.ids > 0)[:, :, None, None]
        compare([torch.where(real, got, 0.0)], [whole[0][:, :, first : first + half]], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("nan")])
def test_numbers_that_are_not_finite_stay_so(bad: float, dtype: torch.dtype) -> None:
    query, key, value = (x.to(dtype) for x in inputs_of(PLAIN))
    query[0, 3, 1, 2] = bad
    context = BmmAttention(PLAIN)(query, key, value, AttentionCall(sequences_of(PLAIN), 0.1))
    assert context[0, 3, 1].isnan().all()
    assert context[0, 4].isfinite().all() and context[1:].isfinite().all()
    leaves = [x.to(dtype).requires_grad_() for x in inputs_of(PLAIN)]
    upstream = torch.ones_like(leaves[0])
    upstream[0, 3, 1, 2] = bad
    BmmAttention(PLAIN)(leaves[0], leaves[1], leaves[2], AttentionCall(sequences_of(PLAIN), 0.1)).backward(upstream)
    assert leaves[0].grad is not None and leaves[0].grad[0, 3, 1].isnan().any()


def test_large_scores() -> None:
    inputs, sequences = [100 * x for x in inputs_of(PLAIN)], sequences_of(PLAIN)
    expected = values_and_gradients(ReferenceAttention(PLAIN), inputs, sequences)
    compare(values_and_gradients(BmmAttention(PLAIN), inputs, sequences), expected, 1e-7)
    in_float32 = values_and_gradients(BmmAttention(PLAIN), inputs, sequences, torch.float32)
    assert all(x.isfinite().all() for x in in_float32)


def test_work_is_that_of_the_sequences() -> None:
    ids, starts = layout(PACKED_LENGTHS)
    spans = spans_of(PACKED, Sequences(ids, starts), SEQ_LENGTH)
    lengths = [[span.queries[1] - span.queries[0] for span in spans if span.rows[0] == row] for row in range(4)]
    assert lengths == [[5, 4, 6, 1], [16], [3, 3, 10], [16]]
    assert [span.offset for span in spans] == [0, 25, 41, 77, 0, 0, 9, 18, 0]
    full = torch.ones(5, SEQ_LENGTH, dtype=torch.int64)
    together = spans_of(PLAIN, Sequences(full, full), SEQ_LENGTH)
    assert [(span.rows, span.scores) for span in together] == [((0, 5), SEQ_LENGTH**2)]


def test_queries_compute_no_keys_beyond_those_of_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bmm, "TILE_QUERIES", 4)
    monkeypatch.setattr(attention_bmm, "LONG_ROW", 4)
    row = torch.ones(3, 8, dtype=torch.int64)
    ranks = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 3], [7, 6, 5, 4, 3, 2, 1, 0], [0] * 8])
    spans = spans_of(AttentionSpec(HEAD_SIZE, ranked=True), Sequences(row, row, ranks=ranks), 8)
    found = [[(span.keys, span.by_rank) for span in spans if span.rows[0] == number] for number in range(3)]
    assert found == [
        [((0, 5), False), ((0, 8), True)], [((0, 8), True), ((4, 8), True)], [((0, 8), False), ((0, 8), False)],
    ]  # fmt: skip


def test_the_spans_of_a_micro_batch_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    find = attention_bmm.spans_of
    monkeypatch.setattr(attention_bmm, "spans_of", lambda *arguments: calls.append(1) or find(*arguments))
    inputs, sequences = inputs_of(PACKED), sequences_of(PACKED)
    for _ in range(3):
        values_and_gradients(BmmAttention(PACKED), inputs, Sequences(sequences.ids, sequences.starts))
    assert len(calls) == 1
    sequences.ids[0] = 1
    inputs[0].requires_grad_()
    changed = BmmAttention(PACKED)(inputs[0], inputs[1], inputs[2], AttentionCall(sequences))
    compare([changed.detach()], [ReferenceAttention(PACKED)(*inputs, AttentionCall(sequences)).detach()], 1e-11)
    assert len(calls) == 2


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_compute_the_same(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxlm_ds.kernels import cpu_loops

    spec = replace(PLAIN, bias=True, by_distance=True)
    inputs, sequences = inputs_of(spec), sequences_of(spec)
    expected = run(BmmAttention(spec), inputs, sequences, 0.3)
    monkeypatch.setattr(cpu_loops, "SMALLEST_PART", 7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = run(BmmAttention(spec), inputs, sequences, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
def test_in_a_compiled_layer() -> None:
    inputs, sequences = inputs_of(PACKED), sequences_of(PACKED)
    kernel, keys = BmmAttention(PACKED), ProbabilityKeys(KEY, 0, NUM_HEADS)

    def layer(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, starts: Tensor) -> Tensor:
        return kernel(2 * query, key + 1, value, AttentionCall(Sequences(ids, starts), 0.3, keys=keys)).sin()

    def gradients(function: object) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves, sequences.ids, sequences.starts)  # type: ignore[operator]
        out.sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    compare(gradients(torch.compile(layer, fullgraph=True, dynamic=False)), gradients(layer), 1e-12)


def test_what_it_refuses() -> None:
    query, key, value, bias = inputs_of(AttentionSpec(HEAD_SIZE, bias=True))
    with pytest.raises(KernelError, match="`bmm` adds a bias by distance only"):
        BmmAttention(PLAIN)(query, key, value, AttentionCall(sequences_of(PLAIN), 0.0, bias))
    cases = {
        "needs a CPU": Need(PLAIN, "cuda", torch.bfloat16),
        "bf16 or fp32": Need(PLAIN, "cpu", torch.float16),
        "adds a bias by distance only": Need(AttentionSpec(HEAD_SIZE, bias=True), "cpu", torch.float32),
        "must be positive": Need(AttentionSpec(HEAD_SIZE, scale=0.0), "cpu", torch.float32),
    }
    for reason, need in cases.items():
        assert reason in (why_bmm_cannot_run(need) or "")
    assert why_bmm_cannot_run(Need(PLAIN, "cpu", torch.bfloat16)) is None


def test_long_rows_without_dropout_store_no_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bmm, "STORED_SCORES", SEQ_LENGTH**2 - 1)
    calls: list[float] = []

    def other(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        calls.append(call.p)
        return query

    kernel = BmmAttention(PLAIN, long_rows=other)
    inputs, sequences = [x.requires_grad_() for x in inputs_of(PLAIN)], sequences_of(PLAIN)
    kernel(inputs[0], inputs[1], inputs[2], AttentionCall(sequences))
    kernel(inputs[0], inputs[1], inputs[2], AttentionCall(sequences, 0.1))
    with torch.no_grad():
        kernel(inputs[0], inputs[1], inputs[2], AttentionCall(sequences))
    assert calls == [0.0]

"""Triton's attention against the reference in float64: values, gradients, dropped probabilities, and a T5's layers."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ctxlm_ds.families.t5.config import T5Section
from ctxlm_ds.kernels.attention import ReferenceAttention
from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionSpec, ProbabilityKeys, Sequences, visible_keys
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.implementation import Implementation
from ctxlm_ds.kernels.triton.launch import recorded
from ctxlm_ds.kernels.triton.rows import ROWS
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.parameters import initialize_parameters
from ctxlm_ds.registry import KERNELS
from tests.unit.kernels.attention_oracle import KEY_LENGTH, SEQ_LENGTH, layout, sequences_of
from tests.unit.kernels.test_attention import every_spec, name_of
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long

SIZE, HEADS = 64, 2
KEY = torch.tensor(0x5DEECE66D1234567)
KEYS = ProbabilityKeys(KEY, 1, 5)
"""Those of the second and third head of five."""
QUERIES, OTHERS = ([[30, 15], [45], [3, 12, 7]], 45), ([[20, 17], [9], [5, 2, 30]], 38)
"""Lengths of the sequences in rows of a length that no tile divides."""


class Case(NamedTuple):
    """A layer, and what it attends."""

    spec: AttentionSpec
    bias_rows: int = 0
    """Rows of the bias: 0 without one, 1 for one that all rows share."""

    def run(self, kernel: type, dtype: torch.dtype, of: torch.dtype, p: float) -> list[Tensor]:
        """Return the context and the gradients of one matrix of heads and of the bias, for inputs rounded to `of`."""
        draw = torch.Generator().manual_seed(1)
        ids, starts = layout(*QUERIES)
        others = layout(*OTHERS) if self.spec.cross else (ids, starts)
        sequences = Sequences(ids, starts, *(others if self.spec.cross else ()))
        rows, length, seen, size = *ids.shape, others[0].shape[1], self.spec.head_size

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(of).to(dtype).requires_grad_()

        query, both = drawn(rows, length, HEADS, size), drawn(rows, seen, 2, HEADS // (1 + self.spec.grouped), size)
        bias = [drawn(*[self.bias_rows] * (self.bias_rows > 1), HEADS, length, seen)] if self.bias_rows else []
        call = AttentionCall(sequences, p, *(bias or [None]), KEYS)
        context = kernel(self.spec)(query, *both.unbind(2), call)
        upstream = drawn(*context.shape).detach() * (ids > 0)[:, :, None, None]
        gradients = torch.autograd.grad(context, [query, both, *bias], upstream)
        return [torch.where((ids > 0)[:, :, None, None], context, 0.0).detach(), *gradients]


PACKED = AttentionSpec(SIZE, shares_rows=True, bias=True, scale=0.2)
CASES = {
    "T5's encoder": Case(PACKED, bias_rows=1),
    "T5's decoder": Case(AttentionSpec(SIZE, causal=True, shares_rows=True, bias=True, scale=0.2), bias_rows=1),
    "to the encoder": Case(AttentionSpec(SIZE, cross=True, shares_rows=True)),
    "window, groups": Case(AttentionSpec(SIZE, window=7, shares_rows=True, grouped=True)),
    "wide heads": Case(AttentionSpec(128, shares_rows=True, bias=True), bias_rows=3),
}


def check(case: Case, dtype: torch.dtype, p: float) -> list[Tensor]:
    """Compare with float64; 16 bits by the error of the reference in that type."""
    from ctxlm_ds.kernels.triton.attention import TritonAttention

    exact, plain, found = (
        case.run(kernel, to, dtype, p)
        for kernel, to in ((ReferenceAttention, torch.float64), (ReferenceAttention, dtype), (TritonAttention, dtype))
    )
    for wanted, other, ours in zip(exact, plain, found, strict=True):
        errors = ours.double() - wanted, other.double() - wanted
        assert ours.dtype == dtype and ours.shape == wanted.shape
        if dtype == torch.float32:
            assert errors[0].abs().max() <= 2e-6 * wanted.abs().max()
        else:
            assert errors[0].norm() <= errors[1].norm()
    return found


@pytest.mark.parametrize("name", CASES)
@in_interpreter
def test_values_and_gradients_are_those_of_float64(name: str) -> None:
    check(CASES[name], torch.float32, 0.1 if name != "wide heads" else 0.0)


@pytest.mark.parametrize(
    ("name", "dtype", "p"), [("T5's decoder", torch.bfloat16, 0.1), ("wide heads", torch.float16, 0.0)]
)
@in_interpreter
def test_in_16_bits_they_are_nearer_than_those_of_the_reference(name: str, dtype: torch.dtype, p: float) -> None:
    check(CASES[name], dtype, p)


@pytest.mark.parametrize("spec", every_spec(), ids=name_of)
def test_spans_are_the_visible_keys(spec: AttentionSpec) -> None:
    from ctxlm_ds.kernels.triton.attention import spans_of

    sequences = sequences_of(spec)
    of_queries, of_keys = spans_of(spec, sequences)
    real, visible = sequences.ids > 0, visible_keys(spec, sequences)[:, 0]
    seen, places = KEY_LENGTH if spec.cross else SEQ_LENGTH, torch.arange(SEQ_LENGTH)
    keys = torch.arange(seen)
    inside = (keys >= of_queries[:, 0, :, None]) & (keys < of_queries[:, 1, :, None])
    assert torch.equal(inside[real], visible.expand(len(real), -1, -1)[real])
    reached = (places[:, None] >= of_keys[:, None, 0]) & (places[:, None] < of_keys[:, None, 1])
    assert (reached | ~inside)[real].all()
    rows = (sequences.ids if sequences.key_ids is None else sequences.key_ids) > 0
    has_queries = (inside & real[:, :, None]).any(1) & rows
    assert torch.equal((reached & real[:, :, None]).transpose(1, 2)[has_queries],
                       (inside & real[:, :, None]).transpose(1, 2)[has_queries])  # fmt: skip


@in_interpreter
def test_operators_return_what_they_declare() -> None:
    from ctxlm_ds.kernels.triton import attention

    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    heads = torch.randn(1, 9, 3, HEADS, SIZE).requires_grad_()
    ids, starts = layout([[4, 3]], 9)
    spans = attention.spans_of(PACKED, Sequences(ids, starts))
    for bias, draw, p in ((torch.randn(1, HEADS, 9, 9), KEY, 0.1), (None, None, 0.0)):
        given = *heads.unbind(2), *spans, bias, draw, 0.2, p, 0, HEADS
        check(attention.attend, given)
        results = attention.attend(*(x.detach() if isinstance(x, Tensor) else x for x in given))
        others = [x.detach() if isinstance(x, Tensor) else x for x in given]
        check(attention.gradients, (results[0], [*results, *others[:7]], *others[7:], bias is not None))


def t5_results(row: str) -> tuple[list[Tensor], list[str]]:
    """Return a loss of a small T5 and its gradients, with dropout of probabilities on, and the kernels' names."""
    from ctxlm_ds.families.t5.layers import t5_layers

    if "attention.interpreted" not in KERNELS:
        KERNELS.register("attention.interpreted", Implementation("interpreted", ROWS["attention"].make))
    model = T5Section(
        vocab_size=31, hidden_size=24, num_layers=1, num_decoder_layers=1, num_attention_heads=HEADS,
        intermediate_size=16, relative_buckets=8, relative_reach=12, attention_dropout=0.2, hidden_dropout=0.1,
    )  # fmt: skip
    parallel = ParallelContext(dropout=DropoutStreams(seed=5, enabled=True))
    kernels = KernelSet({"attention": row}, "cpu", torch.float32)
    build = ModelBuild(("decoder_logits",), kernels, parallel, shares_rows=True)
    layers = LayerSequence(t5_layers(model, build), ["decoder_logits"], parallel.dropout)
    initialize_parameters(layers, 1)
    fields = {}
    for prefix, lengths, length in (("", [[9, 12], [20]], 23), ("decoder_", [[7, 4], [13]], 14)):
        ids, starts = layout(lengths, length)
        words = torch.randint(0, 31, ids.shape, generator=torch.Generator().manual_seed(length))
        fields |= {f"{prefix}input_ids": words, f"{prefix}sequence_ids": ids, f"{prefix}sequence_starts": starts}
    layers.streams.begin(3, 1, torch.device("cpu"))
    with recorded() as launches:
        logits = layers.run(fields)["decoder_logits"]
        loss = torch.where(fields["decoder_sequence_ids"][..., None] > 0, logits, 0.0).sin().sum()
        found = torch.autograd.grad(loss, list(layers.parameters()))
    return [loss, *found], [launch.kernel.__name__ for launch in launches]


@in_interpreter
def test_a_t5_has_the_losses_and_gradients_of_the_reference() -> None:
    (found, launched), (wanted, _) = t5_results("interpreted"), t5_results("reference")
    assert launched[:3] == ["context_kernel"] * 3 and launched.count("bias_kernel") == 2
    assert launched.count("query_kernel") == launched.count("key_value_kernel") == 3
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())

"""A decoder's loss, some rows at a time, against float64 (several ranks: tests/dist/test_cross_entropy_linear.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.parallel import cross_entropy
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import TILE, chunk_rows
from ctxlm_ds.parallel.layers import VocabParallelEmbedding
from ctxlm_ds.parallel.parameters import Normal

WORDS, WIDTH, ROWS = 61, 8, 300
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK", TILE * WORDS)


def decoder(dtype: torch.dtype, linear: str = "torch") -> VocabParallelEmbedding:
    kernels = KernelSet({"cross_entropy": "chunked", "linear": linear}, "cpu", dtype)
    table = VocabParallelEmbedding(WORDS, WIDTH, Normal(1.0), kernels, ParallelContext(vocab_multiple=16))
    with torch.no_grad():
        table.weight[:WORDS].normal_(generator=torch.Generator().manual_seed(0))
    return table.to(dtype)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, ROWS // 2, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(WORDS, (2, ROWS // 2), generator=generator)
    labels[:, ::7] = IGNORE_LABEL
    return hidden, labels, torch.randn(64, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize(
    ("dtype", "linear"), [(torch.float32, "torch"), (torch.bfloat16, "torch"), (torch.bfloat16, "float32")]
)
@pytest.mark.parametrize(("with_bias", "z_loss"), [(True, 0.0), (False, 0.0), (True, 0.1)])
def test_loss_hits_and_gradients(dtype: torch.dtype, linear: str, with_bias: bool, z_loss: float) -> None:
    table, (hidden, labels, bias) = decoder(dtype, linear), inputs(dtype)
    loss, hits, *squares = table(hidden, labels, bias if with_bias else None, z_loss=z_loss)
    (0.3 * loss).backward()
    exact: list[Any] = [x.detach().double().requires_grad_() for x in (hidden, table.weight[:WORDS], bias[:WORDS])]
    logits = F.linear(exact[0], exact[1], exact[2] if with_bias else None).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum")
    squared = logits.logsumexp(-1).square()[labels.flatten() != IGNORE_LABEL].sum()
    (0.3 * (expected + z_loss * squared)).backward()
    assert loss.dtype == torch.float32
    assert [float(x) for x in squares] == pytest.approx([float(squared.detach())] * bool(z_loss), rel=BOUNDS[dtype])
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=BOUNDS[dtype] / 10)
    assert float(hits) == float((logits.argmax(-1) == labels.flatten()).sum()) > 0
    assert not table.weight.grad[WORDS:].any()
    for found, wanted in zip((hidden, table.weight, bias)[: 2 + with_bias], exact, strict=False):
        difference = found.grad.double()[: len(wanted)] - wanted.grad
        assert float(difference.abs().max() / wanted.grad.abs().max()) < BOUNDS[dtype]


def test_without_any_label_loss_and_gradients_are_zero() -> None:
    table, (hidden, labels, _) = decoder(torch.float32), inputs(torch.float32)
    loss, hits = table(hidden, torch.full_like(labels, IGNORE_LABEL))
    loss.backward()
    assert (float(loss.detach()), float(hits)) == (0, 0)
    assert not hidden.grad.any() and not table.weight.grad.any()


def test_evaluation_computes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    table, (hidden, labels, bias) = decoder(torch.float32), inputs(torch.float32)
    expected = table(hidden, labels, bias)
    monkeypatch.setattr(cross_entropy, "_add_product", None)
    monkeypatch.setattr(torch, "empty_like", None)
    with torch.no_grad():
        assert [float(x) for x in table(hidden, labels, bias)] == [float(x.detach()) for x in expected]


@pytest.mark.parametrize(
    ("rows", "words", "size"), [(1, 61, 128), (300, 61, 128), (4096, 50304, 384), (160, 30592, 256)]
)
def test_chunks_are_even_and_bounded(rows: int, words: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK", TILE * WORDS if words == WORDS else 1 << 24)
    assert chunk_rows(rows, words, torch.device("cpu")) == size

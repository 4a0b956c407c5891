"""Triton's cross entropy against the plain passes and float64."""

from __future__ import annotations

import math

import pytest
import torch

from ctxlm_ds.kernels import cross_entropy
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows_of_logits(words: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits with a tie, a padded end and large numbers, and labels of which two are other ranks'."""
    logits = 4 * torch.randn(6, words, generator=torch.Generator().manual_seed(words))
    logits[1, words // 2] = logits[1, words // 3] = 30.0
    logits[2] += 60.0
    logits[:, words - 2 :] = -math.inf
    return logits.to(dtype), torch.tensor([0, words // 2, words - 3, -1, words, 5])


@pytest.mark.parametrize("words", [11, 4096, 9003])
@pytest.mark.parametrize("dtype", DTYPES)
@in_interpreter
def test_statistics_are_those_of_the_plain_pass(words: int, dtype: torch.dtype) -> None:
    from ctxlm_ds.kernels.triton.cross_entropy import KERNEL

    logits, labels = rows_of_logits(words, dtype)
    found, expected = KERNEL.statistics(logits, labels), cross_entropy.row_statistics(logits, labels)
    assert found.word.tolist() == expected.word.tolist() == logits.float().argmax(1).tolist()
    assert torch.equal(found.largest, expected.largest) and torch.equal(found.of_label, expected.of_label)
    exact = (logits.double() - expected.largest.double()[:, None]).exp().sum(1)
    torch.testing.assert_close(found.total.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("words", [11, 9003])
@pytest.mark.parametrize("dtype", DTYPES)
@in_interpreter
def test_gradient_is_that_of_float64(words: int, dtype: torch.dtype) -> None:
    from ctxlm_ds.kernels.triton.cross_entropy import KERNEL

    logits, labels = rows_of_logits(words, dtype)
    log_total, factor = logits.double().logsumexp(1).float(), torch.linspace(0.5, 1.5, 6)
    log_total[4] = math.inf
    for given in (None, factor):
        exact = (logits.double() - log_total.double()[:, None]).exp()
        if given is not None:
            exact *= given.double()[:, None]
        inside = (labels >= 0) & (labels < words)
        exact[inside, labels[inside]] -= 1.0
        plain = cross_entropy.row_gradient(logits, labels, log_total, given)
        found = KERNEL.gradient(logits.clone(), labels, log_total, given)
        errors = [((x.double() - exact).abs().max() / exact.abs().max()).item() for x in (found, plain)]
        assert found.dtype == dtype and errors[0] <= max(2e-6, errors[1])
        assert not found[:, words - 2 :].any() and not found[4].any()


@in_interpreter
def test_a_rank_without_words_adds_nothing() -> None:
    from ctxlm_ds.kernels.triton.cross_entropy import KERNEL

    nothing = torch.full((2, 9), -math.inf)
    largest, word, total, of_label = KERNEL.statistics(nothing, torch.tensor([0, -1]))
    assert largest.isfinite().all() and word.tolist() == [0, 0] and total.tolist() == [0, 0] and of_label[1] == 0
    assert not KERNEL.gradient(nothing, torch.tensor([-1, -1]), torch.tensor([1.0, 2.0])).any()


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@in_interpreter
def test_a_decoder_gets_its_loss_and_gradients_over_several_chunks(z_loss: float) -> None:
    from ctxlm_ds.kernels.triton.cross_entropy import KERNEL
    from ctxlm_ds.parallel import cross_entropy as decoder
    from ctxlm_ds.parallel.context import ParallelContext

    draw = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 12, generator=draw) for n in (300, 40))
    labels = torch.randint(0, 37, (300,), generator=draw)
    labels[::3] = -100
    results = []
    for kernel in (KERNEL, cross_entropy.CHUNKED):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        call = decoder.LinearCrossEntropy(kernel, ParallelContext(), 37, False, False, z_loss)
        decoder.CPU_CHUNK = 128 * 40  # three chunks
        loss, *others = call(x, w, None, labels)
        results.append([loss, *others, *torch.autograd.grad(loss, (x, w))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)

"""What passes with and without a pipeline share: the loss that fp16 must not hide."""

from __future__ import annotations

import math

import pytest
import torch

from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.engine.forward_backward import PassContext
from ctxlm_ds.training.engine.losses import TermLosses

LARGE = 3e38
"""The loss overflows with this factor, its gradients do not."""


def context(is_fp16: bool) -> PassContext:
    parallel = ParallelContext()
    losses = TermLosses([LossTerm("lm", ("logits",), ("labels",))], ["logits"], parallel)
    return PassContext(losses, parallel, Topology(), is_fp16, shares={})


@pytest.mark.parametrize("is_fp16", [False, True])
@pytest.mark.parametrize("factor", [0.5, LARGE])
def test_an_infinite_loss_has_gradients_that_deepspeed_notices_in_fp16(is_fp16: bool, factor: float) -> None:
    logits, labels = torch.tensor([[[1.0, 2.0, 3.0]]], requires_grad=True), {"labels": torch.tensor([[0]])}
    loss, sums = context(is_fp16).loss((logits,), labels, torch.tensor([factor]))
    loss.backward()
    assert logits.grad is not None
    assert math.isfinite(loss.item()) == (factor != LARGE)
    assert logits.grad.isnan().all() == (is_fp16 and factor == LARGE)
    if not is_fp16:
        expected = factor * (logits.detach().softmax(-1) - torch.tensor([1.0, 0.0, 0.0]))
        torch.testing.assert_close(logits.grad, expected)
    assert (float(sums["lm/count"]), float(sums["lm/loss_sum"])) == (1, pytest.approx(2.4076, rel=1e-4))

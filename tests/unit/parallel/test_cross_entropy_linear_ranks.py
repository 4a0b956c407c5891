"""The loss of a vocabulary split over 8 and 64 ranks in one process, against the whole one in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.cross_entropy import CHUNKED
from ctxlm_ds.parallel import cross_entropy
from ctxlm_ds.parallel.cross_entropy import TILE, LinearCrossEntropy
from tests.local_ranks import assert_each, drawn, local_ranks, needs_local_tensors, of_leaf, values

pytestmark = [needs_local_tensors, pytest.mark.long]
WIDTH, WORDS, ROWS, Z_LOSS, FACTOR = 8, 4, 320, 0.2, 0.3
"""Words of a rank, rows of all."""


@pytest.mark.parametrize(("size", "splits_tokens"), [(8, False), (8, True), (64, True)])
def test_losses_hits_and_gradients(size: int, splits_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, ignored rows, and a word of the first rank that ties with one of the last."""
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK", TILE * WORDS)
    x, weight, bias = drawn(1, ROWS, WIDTH), drawn(2, size * WORDS, WIDTH), drawn(3, size * WORDS)
    first, last = 1, size * WORDS - 2
    labels = torch.randint(size * WORDS, (ROWS,), generator=torch.Generator().manual_seed(4))
    labels[::7] = IGNORE_LABEL
    labels[1], labels[2] = first, last
    with torch.no_grad():
        for value in (x, weight, bias):
            value.copy_((4.0 * value).round() / 4.0)  # products without rounding, so that equal words tie
        weight[last], bias[last] = weight[first], bias[first]
        x[1:3] = 9.0 * weight[first]
    logits = F.linear(x, weight, bias)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_LABEL, reduction="sum")
    squares = logits.logsumexp(-1).square()[labels != IGNORE_LABEL].sum()
    (FACTOR * (loss + Z_LOSS * squares)).backward()
    with local_ranks(size) as ranks:
        parallel = ranks.context(sequence_parallel=splits_tokens)
        hidden = ranks.split(x) if splits_tokens else ranks.whole(x)
        own = [hidden, ranks.split(weight), ranks.split(bias)]
        compare = LinearCrossEntropy(CHUNKED, parallel, WORDS, False, splits_tokens, Z_LOSS)
        found, hits, found_squares = compare(*own, ranks.whole(labels))
        (FACTOR * found).backward()
    # The statistics of rows are fp32.
    assert_each(found, [loss.detach()] * size, rtol=1e-6)
    assert_each(found_squares, [squares.detach()] * size, rtol=1e-6)
    at_first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert (at_first[1], at_first[2]) == (first, first)
    assert {float(value) for value in values(hits)} == {float((at_first == labels).sum())}
    of_hidden = of_leaf(x)
    expected = [list(of_hidden.chunk(size)) if splits_tokens else [of_hidden] * size]
    expected += [list(of_leaf(value).chunk(size)) for value in (weight, bias)]
    for leaf, gradients in zip(own, expected, strict=True):
        assert_each(of_leaf(leaf), gradients, rtol=1e-5, atol=1e-5)

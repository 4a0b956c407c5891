"""Statistics and gradient of rows of logits against their definition in float64."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.kernels.cross_entropy import IMPLEMENTATIONS, CrossEntropyKernel
from ctxlm_ds.kernels.implementation import Need

ON_CPU = Need(None, "cpu", torch.float32)
ROWS = {row.name: row for row in IMPLEMENTATIONS}


def kernel_of(name: str) -> CrossEntropyKernel:
    if ROWS[name].why_not(ON_CPU):
        pytest.skip(str(ROWS[name].why_not(ON_CPU)))
    made: CrossEntropyKernel = ROWS[name].make(ON_CPU)
    return made


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("chunked", torch.float32), ("chunked", torch.bfloat16), ("compiled", torch.bfloat16),
        pytest.param("compiled", torch.float32, marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_numbers_are_those_of_a_softmax(name: str, dtype: torch.dtype) -> None:
    logits = 3 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    logits[:, 6] = float("-inf")
    logits[2, 1] = logits[2, 4] = 9.0
    logits, labels = logits.to(dtype), torch.tensor([0, 5, 1, -3, 7])
    exact, inside, kernel = logits.double(), torch.tensor([True, True, True, False, False]), kernel_of(name)
    largest, word, total, of_label = kernel.statistics(logits, labels)
    assert largest.tolist() == exact.amax(-1).tolist() and word.tolist() == exact.argmax(-1).tolist() and word[2] == 1
    torch.testing.assert_close((largest + total.log()).double(), exact.logsumexp(-1))
    assert of_label.tolist() == exact.gather(1, labels.where(inside, 0)[:, None])[:, 0].where(inside, 0.0).tolist()
    expected = exact.softmax(-1)
    expected[torch.arange(3), labels[:3]] -= 1.0
    expected[4] = 0.0
    log_total = exact.logsumexp(-1).float()
    log_total[4] = float("inf")
    found = kernel.gradient(logits, labels, log_total)
    assert found.dtype == dtype and not found[:, 6].any()
    torch.testing.assert_close(found, expected.to(dtype))


def test_a_rank_without_words_adds_nothing() -> None:
    nothing = torch.full((2, 3), float("-inf"))
    largest, _, total, of_label = kernel_of("chunked").statistics(nothing, torch.tensor([0, -1]))
    assert largest.isfinite().all() and total.tolist() == [0, 0] and of_label[1] == 0
    assert not kernel_of("chunked").gradient(nothing, torch.tensor([-1, -1]), torch.tensor([1.0, 2.0])).any()


def test_cpus_take_all_logits_and_other_devices_some_rows_at_a_time() -> None:
    def first(device: str) -> list[str]:
        return [row.name for row in IMPLEMENTATIONS if row.suits(Need(None, device, torch.bfloat16))]

    assert first("cpu") == ["full"] and first("cuda") == ["chunked", "full"]

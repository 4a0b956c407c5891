"""The operations of a step are those of its products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tools.benchmark import ceiling


class Enough(Exception):
    pass


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_operations_of_a_step(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setitem(ceiling.SIDES, "cpu", 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    counter = FlopCounterMode(display=False)

    def end(*_: Any) -> None:
        raise Enough

    with pytest.raises(Enough), counter:
        ceiling.MatrixProducts(precision, threads=torch.get_num_threads()).run(end)
    assert counter.get_total_flops() == ceiling.step_flops("cpu")

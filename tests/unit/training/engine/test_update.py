"""What a step adds up, the counts of the next step, and the verdict on its loss, on one rank."""

from __future__ import annotations

import math

import pytest
import torch

from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.objectives.base import LossTerm
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.engine.update import StepJudge, StepTotals
from ctxlm_ds.training.loop.state import Ahead, Anomaly

TERMS = (LossTerm("words", ("logits",), ("labels",)), LossTerm("order", ("order",), ("next",), weight=0.5))


def sums_of(loss: float) -> dict[str, torch.Tensor]:
    values = {"words": (loss, 3.0, 4.0), "order": (1.0, 1.0, 2.0)}
    return {
        f"{term}/{figure}": torch.tensor(value)
        for term, figures in values.items()
        for figure, value in zip(("loss_sum", "correct", "count"), figures, strict=True)
    }


def step_of(words: int) -> Step:
    return Step([], {"words": words, "order": 2}, num_tokens=10 * words, rows_consumed=1, epoch=0)


def totals_of(topology: Topology | None = None) -> StepTotals:
    return StepTotals(TERMS, topology or Topology(), torch.device("cpu"))


def judge_of(totals: StepTotals, is_fp16: bool = False) -> StepJudge:
    return StepJudge(totals, TERMS, 6, is_fp16, lambda loss: None)


def test_the_counts_of_the_next_step_travel_with_the_sums_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[torch.Tensor] = []
    monkeypatch.setattr(Topology, "add_on_device", lambda self, values: (added.append(values), values)[1])
    totals, first, second = totals_of(), step_of(4), step_of(7)
    assert totals.counts_of(first).predictions == [4.0, 2.0]
    judge = judge_of(totals)
    assert not judge(totals.start(sums_of(8.0), Ahead(second, (0.0, 1.5))).tolist())
    assert (judge.losses, judge.total) == ({"words": 2.0, "order": 0.5}, 2.25)
    assert judge.accuracy == {"words": 0.75, "order": 0.5}
    assert judge.flags == (0.0, 1.5)
    counts = totals.counts_of(second)
    assert (counts.predictions, counts.num_tokens) == ([7.0, 2.0], 70)
    assert len(added) == 2
    # Another step than the one that was told of: the run went back.
    assert totals.counts_of(step_of(9)).num_tokens == 90
    assert len(added) == 3


def test_a_step_that_told_of_none_ahead_leaves_no_counts_behind() -> None:
    totals, step = totals_of(), step_of(4)
    totals.counts_of(step)
    totals.finish(totals.start({}, Ahead()).tolist())
    step.counts["words"] = 5
    assert totals.counts_of(step).predictions == [5.0, 2.0]


def test_ranks_that_hold_the_same_as_another_add_nothing() -> None:
    inner = Topology(rank=1, tensor_parallel_rank=1, tensor_parallel_size=2)
    values = totals_of(inner).start(sums_of(8.0), Ahead(step_of(4), (1.0,))).tolist()
    assert values == [0.0] * 9 + [1.0]


def test_a_loss_that_is_not_finite_is_refused_but_in_fp16() -> None:
    totals = totals_of()
    judge = judge_of(totals)
    assert judge(totals.start(sums_of(math.nan), Ahead()).tolist())
    assert judge.anomaly == Anomaly("non_finite", "the loss of step 7 is nan (words nan, order 0.5)")
    judge = judge_of(totals, is_fp16=True)
    assert not judge(totals.start(sums_of(math.inf), Ahead()).tolist())
    assert judge.anomaly is None

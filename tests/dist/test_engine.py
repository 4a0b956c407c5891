"""Losses and gradient norms are those of one rank under tensor, pipeline and data parallelism, every ZeRO stage."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig, TrainingConfig
from tests.dist.runner import run_ranks
from tests.dist.training import GLOBAL_BATCH, SEQ_LENGTH, build_engine, step_of, tiny_config, train

pytestmark = pytest.mark.dist
STEPS, SOAK_STEPS, HEADS = 3, 20, 4
FAMILIES = ("bert", "roberta", "gpt2", "gpt1")


@dataclass(frozen=True)
class Case:
    """A layout and what else may change nothing."""

    tensor: int
    pipeline: int
    data: int
    stage: int
    micro_batch_size: int = 4
    sequence_parallel: bool = False
    recompute: bool = False
    context: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    def __str__(self) -> str:
        words = [f"tp{self.tensor}", f"pp{self.pipeline}", f"dp{self.data}", f"zero{self.stage}"]
        words += [f"cp{self.context}"] * (self.context > 1)
        words += [f"mb{self.micro_batch_size}"] + ["sp"] * self.sequence_parallel + ["recompute"] * self.recompute
        return "-".join(words)

    def config(self, family: str, **parallel: Any) -> RunConfig:
        """Four layers of four heads, so that four stages and four tensor-parallel ranks have something to hold."""
        config = tiny_config(
            family,
            training=TrainingConfig(
                global_batch_size=GLOBAL_BATCH, micro_batch_size=self.micro_batch_size, precision="fp32",
                activation_checkpointing=self.recompute,
            ),
            parallel=ParallelConfig(
                tensor_parallel_size=self.tensor, pipeline_parallel_size=self.pipeline,
                context_parallel_size=self.context, sequence_parallel=self.sequence_parallel, **parallel,
            ),
        )  # fmt: skip
        return config.with_values("model", num_layers=4, num_attention_heads=HEADS)

    @property
    def user_json(self) -> dict[str, Any]:
        return {"zero_optimization": {"stage": self.stage}}


def every_case() -> list[Case]:
    """Every layout of at most 8 ranks with each stage it allows; batch splits and recomputation take turns."""
    cases = []
    for context, tensor, pipeline, data in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2)):
        if context * tensor * pipeline * data > 8 or context * tensor > HEADS:
            continue
        for stage in range(4 if pipeline == 1 else 2):
            for turn, sequence_parallel in enumerate([False, True][: 1 + (tensor > 1)]):
                micro = (4, 2, 8)[(stage + data + turn + pipeline) % 3]
                recompute = (stage + tensor + turn) % 2 == 1
                cases.append(Case(tensor, pipeline, data, stage, micro, sequence_parallel, recompute, context))
    return cases


EVERY_CASE = every_case()
ALWAYS = {
    "bert": [
        Case(1, 1, 2, 0, 4), Case(2, 1, 2, 3, 4, sequence_parallel=True),
        Case(2, 2, 2, 1, 4, sequence_parallel=True, recompute=True), Case(1, 1, 1, 1, 1, context=2),
    ],
    "gpt2": [Case(1, 1, 1, 2, 4, recompute=True, context=2)],
}  # fmt: skip
"""Without a soak: layouts that tests/families/test_contract.py lacks."""


@cache
def reference_of(family: str, steps: int = STEPS) -> dict[str, Any]:
    """One rank, ZeRO 0, the whole batch at once."""
    case = Case(1, 1, 1, 0, GLOBAL_BATCH)
    found: dict[str, Any] = run_ranks(train, 1, case.config(family), case.user_json, steps, timeout_s=120)[0]
    return found


def parameters() -> list[Any]:
    chosen = [
        pytest.param(family, case, STEPS, id=f"{family}-{case}")
        for family in FAMILIES
        for case in ALWAYS.get(family, [])
    ]
    rest = [
        pytest.param(family, case, SOAK_STEPS, id=f"{family}-{case}", marks=pytest.mark.soak)
        for family in FAMILIES
        for case in EVERY_CASE
        if case not in ALWAYS.get(family, [])
    ]
    return chosen + rest


@pytest.mark.parametrize(("family", "case", "steps"), parameters())
def test_a_layout_gives_the_numbers_of_one_rank(family: str, case: Case, steps: int, record_property: Any) -> None:
    reference = reference_of(family, steps)
    results = run_ranks(train, case.world_size, case.config(family), case.user_json, steps, timeout_s=280)
    worst = 0.0
    for result, figure in itertools.product(results, ("losses", "norms")):
        assert result[figure] == pytest.approx(reference[figure], rel=1e-5)
        worst = max(worst, *(abs(a / b - 1) for a, b in zip(result[figure], reference[figure], strict=True)))
    for name, weight in reference["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-3, atol=1e-4, msg=name)
    record_property("largest_relative_difference", worst)


@pytest.mark.parametrize(
    "parallel", [{"pipeline_layers": [1, 3]}, {"pipeline_partition": "uniform"}], ids=["by hand", "uniform"]
)
def test_where_a_pipeline_is_cut_changes_nothing(parallel: dict[str, Any]) -> None:
    case = Case(1, 2, 1, 1)
    results = run_ranks(train, 2, case.config("bert", **parallel), case.user_json, STEPS, timeout_s=120)
    assert results[0]["losses"] == pytest.approx(reference_of("bert")["losses"], rel=1e-5)


def vocabulary_padding(rank: int, world_size: int, config: RunConfig) -> tuple[list[float], int, float]:
    """Losses, rows of this rank's word embedding, and the largest number in the rows of padding after training."""
    engine = build_engine(config, {"zero_optimization": {"stage": 1}})
    losses = [engine.train_step(step_of(engine, step), step, 0.01).loss for step in range(3)]
    weight = dict(engine.named_parameters)["word_embeddings.weight"].detach()
    words = engine.fragments()[0].shard.num_rows
    return losses, weight.shape[0], float(weight[words:].abs().sum())


@pytest.mark.parametrize(
    ("tensor", "multiple", "rows"), [(1, 8, 64), (2, 16, 32), pytest.param(4, 32, 32, marks=pytest.mark.soak)]
)
def test_rows_that_pad_the_vocabulary_stay_zero(tensor: int, multiple: int, rows: int) -> None:
    """61 words; with 4 ranks of 32 rows the last two hold nothing but padding."""
    config = Case(tensor, 1, 1, 1).config("bert", vocab_multiple=multiple)
    for losses, num_rows, padding in run_ranks(vocabulary_padding, tensor, config, timeout_s=120):
        assert losses == pytest.approx(reference_of("bert")["losses"], rel=1e-5)
        assert (num_rows, padding) == (rows, 0.0)


def evaluate(rank: int, world_size: int, case: Case, family: str) -> list[dict[str, float]]:
    """Held-out figures before and after a training step, which evaluation must not disturb."""
    engine = build_engine(case.config(family), case.user_json)
    figures = [engine.evaluate(step_of(engine, 7).micro_batches)]
    engine.train_step(step_of(engine, 0), 0, 0.01)
    figures.append(engine.evaluate(step_of(engine, 8).micro_batches))
    engine.train_step(step_of(engine, 1), 1, 0.01)
    figures.append(engine.evaluate(step_of(engine, 7).micro_batches))
    return figures


@pytest.mark.parametrize("family", [pytest.param("bert", marks=pytest.mark.soak), "gpt2"])
def test_evaluation_gives_the_same_figures(family: str) -> None:
    expected = run_ranks(evaluate, 1, Case(1, 1, 1, 0), family, timeout_s=120)[0]
    cases = (Case(1, 2, 2, 1), Case(2, 1, 2, 3), Case(2, 2, 1, 0, sequence_parallel=True), Case(1, 1, 1, 1, context=2))
    for case in cases:
        for figures in run_ranks(evaluate, case.world_size, case, family, timeout_s=120):
            for got, wanted in zip(figures, expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-5)


def predict_on_one_side(rank: int, world_size: int, case: Case, family: str, first: bool) -> list[tuple[float, float]]:
    """Losses and norms of full rows with predictions in one half alone; BERT's have a sequence over the middle."""
    borders = torch.tensor([0, SEQ_LENGTH // 4, 3 * SEQ_LENGTH // 4, SEQ_LENGTH])
    sequences = torch.arange(1, 4).repeat_interleave(borders.diff())
    engine, figures = build_engine(case.config(family), case.user_json), []
    for number in range(STEPS):
        step = step_of(engine, number)
        for batch in step.micro_batches:
            fields, batch_size = batch.fields, len(batch.fields["input_ids"])
            if family == "bert":
                fields["sequence_ids"][:] = sequences
                fields["sequence_starts"] = borders.to(fields["sequence_starts"]).expand(batch_size, -1)
                fields["prediction_positions"] += 0 if first else SEQ_LENGTH // 2
            else:
                other = slice(SEQ_LENGTH // 2, None) if first else slice(SEQ_LENGTH // 2)
                fields["causal_lm_labels"][:, other] = IGNORE_LABEL
        counts = {
            name: sum(int((batch.fields[f"{name}_labels"] != IGNORE_LABEL).sum()) for batch in step.micro_batches)
            for name in step.counts
            if not name.endswith("_z")
        }
        result = engine.train_step(replace(step, counts=step.counts | counts), number, 0.01)
        figures.append((result.loss, result.grad_norm))
    return figures


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_one_rank_of_a_row_may_have_all_predictions(family: str) -> None:
    for first in (True, False):
        wanted, *found = (
            run_ranks(predict_on_one_side, case.world_size, case, family, first)[-1]
            for case in (Case(1, 1, 1, 0), Case(1, 1, 1, 1, context=2))
        )
        assert sum(found[0], ()) == pytest.approx(sum(wanted, ()), rel=1e-5)


@pytest.mark.parametrize(("family", "stage"), [("bert", 1), ("gpt2", 2)])
def test_ranks_of_a_row_train_in_bf16(family: str, stage: int) -> None:
    case = Case(1, 1, 1, stage, context=2)
    config = case.config(family).with_values("training", precision="bf16")
    for result in run_ranks(train, 2, config, case.user_json, STEPS):
        assert result["losses"] == pytest.approx(reference_of(family)["losses"], rel=5e-3)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_ranks_of_a_row_run_compiled_layers(family: str) -> None:
    case = Case(1, 1, 1, 1, context=2)
    config = case.config(family).with_values("training", compile=True)
    result = run_ranks(train, 2, config, case.user_json, STEPS, timeout_s=400)[0]
    assert result["losses"] == pytest.approx(reference_of(family)["losses"], rel=1e-5)


def test_the_comparison_can_fail() -> None:
    """Steps differ from one another by far more than the tolerance, and norms are those before clipping."""
    found = reference_of("bert", 2 * STEPS)
    losses, clipping = found["losses"], Case(1, 1, 1, 0).config("bert").optimizer.gradient_clipping
    assert max(found["norms"][:STEPS]) > 1.2 * clipping > 0
    assert max(abs(a - b) / a for a, b in itertools.pairwise(losses)) > 1e-2

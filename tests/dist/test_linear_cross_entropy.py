"""Losses inside decoders under tensor parallelism, pipelines and ZeRO-3: the numbers of one rank with all logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.parallel import linear_cross_entropy
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import VocabParallelEmbedding
from ctxlm_ds.parallel.mappings import own_tokens
from ctxlm_ds.parallel.topology import build_topology
from ctxlm_ds.recipe.schema import KernelsConfig, RunConfig
from tests.dist.runner import ranks_of_this_file, run_ranks  # noqa: F401 (the chunks become small)
from tests.dist.test_engine import Case
from tests.dist.test_megatron import INIT, drawn
from tests.dist.training import GLOBAL_BATCH, build_engine, step_of, train

pytestmark = pytest.mark.dist
RANKS, WORDS, WIDTH, ROWS, STEPS = 2, 61, 8, 300, 3


def check_decoder(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """Several chunks; the second rank's rows are most of the padding, the bias has its own gradient."""
    linear_cross_entropy.CPU_CHUNK = linear_cross_entropy.TILE * 40
    group = build_topology(rank, RANKS, RANKS).tensor_group
    parallel = ParallelContext(RANKS, rank, group, sequence_parallel, vocab_multiple=40)
    kernels = KernelSet({"cross_entropy": "chunked"}, "cpu", torch.float32)
    table = VocabParallelEmbedding(WORDS, WIDTH, INIT, kernels, parallel)
    rows = slice(table.first_row, table.first_row + table.num_words)
    exact: list[Any] = [drawn(1, ROWS, WIDTH), drawn(2, WORDS, WIDTH), drawn(3, WORDS)]
    exact = [x.double().requires_grad_() for x in exact]
    labels = torch.randint(WORDS, (ROWS,), generator=torch.Generator().manual_seed(4))
    labels[::7] = IGNORE_LABEL
    logits = F.linear(*exact)
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE_LABEL, reduction="sum")
    squared = logits.logsumexp(-1).square()[labels != IGNORE_LABEL].sum()
    (0.3 * (expected + 0.2 * squared)).backward()

    bias = torch.zeros(table.num_rows)
    with torch.no_grad():
        table.weight[: table.num_words] = exact[1][rows].float()
        bias[: table.num_words] = exact[2][rows].float()
    bias.requires_grad_()
    hidden = exact[0].detach().float()
    hidden = (own_tokens(hidden, parallel).clone() if sequence_parallel else hidden).requires_grad_()
    loss, hits, squares = table.compare(hidden, labels, bias, sequence_parallel, z_loss=0.2)
    (0.3 * loss).backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert float(squares) == pytest.approx(float(squared.detach()), rel=1e-6)
    assert float(hits) == float((logits.argmax(-1) == labels).sum()) > 0
    of_hidden = exact[0].grad.float()
    wanted = (own_tokens(of_hidden, parallel) if sequence_parallel else of_hidden, exact[1].grad[rows].float(),
              exact[2].grad[rows].float())  # fmt: skip
    for found, value in zip((hidden, table.weight, bias), wanted, strict=True):
        torch.testing.assert_close(found.grad[: len(value)], value, rtol=1e-4, atol=1e-5)
        assert not found.grad[len(value) :].any()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_split_decoder(sequence_parallel: bool) -> None:
    run_ranks(check_decoder, RANKS, sequence_parallel)


def chunked(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"kernels": KernelsConfig(cross_entropy="chunked")})


def with_z_loss(config: RunConfig) -> RunConfig:
    """A weight with which the term is about a tenth of the loss."""
    return config.model_copy(update={"objective": config.objective.model_copy(update={"z_loss": 0.02})})


CASES = [
    Case(1, 1, 1, 0), Case(1, 1, 2, 3, recompute=True), Case(1, 2, 1, 1, 2),
    Case(2, 1, 1, 1, sequence_parallel=True), Case(2, 1, 2, 3),
]  # fmt: skip
OF_PARTS = [pytest.param("gpt2", case, marks=pytest.mark.soak) for case in CASES[1:4:2]]
"""What the last case splits as well."""


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """One rank that holds all logits."""
    whole = Case(1, 1, 1, 0, GLOBAL_BATCH)
    configs = {family: whole.config(family) for family in ("bert", "gpt2")}
    configs["gpt2 with z_loss"] = with_z_loss(configs["gpt2"])
    return {
        name: run_ranks(train, 1, config, whole.user_json, STEPS, timeout_s=120)[0] for name, config in configs.items()
    }


@pytest.mark.parametrize(
    ("family", "case"), [*(("gpt2", case) for case in CASES[::2]), *OF_PARTS, ("bert", CASES[-2])], ids=str
)
def test_training_is_that_with_all_logits(family: str, case: Case, references: dict[str, dict[str, Any]]) -> None:
    config = chunked(case.config(family, vocab_multiple=8))
    for result in run_ranks(train, case.world_size, config, case.user_json, STEPS, timeout_s=280):
        for figure in ("losses", "norms"):
            assert result[figure] == pytest.approx(references[family][figure], rel=1e-5)


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (CASES[2], "full"), (CASES[3], "full"), (CASES[0], "chunked"), (CASES[-1], "chunked"),
        pytest.param(CASES[2], "chunked", marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_the_z_loss_does_not_depend_on_the_layout(
    case: Case, kernel: str, references: dict[str, dict[str, Any]]
) -> None:
    """Micro-batches, pipeline stages, a split vocabulary with padding, and chunks, against one rank with all logits."""
    config = with_z_loss(case.config("gpt2", vocab_multiple=8))
    config = chunked(config) if kernel == "chunked" else config
    for result in run_ranks(train, case.world_size, config, case.user_json, STEPS, timeout_s=280):
        for figure in ("losses", "norms"):
            assert result[figure] == pytest.approx(references["gpt2 with z_loss"][figure], rel=1e-5)
            assert result[figure] != pytest.approx(references["gpt2"][figure], rel=1e-2)


def evaluate(rank: int, world_size: int, config: RunConfig) -> dict[str, float]:
    """Held-out figures after a step."""
    engine = build_engine(config, {"zero_optimization": {"stage": 1}})
    engine.train_step(step_of(engine, 0), 0, 0.01)
    figures: dict[str, float] = engine.evaluate(step_of(engine, 1).micro_batches)
    return figures


@pytest.mark.parametrize("has_z_loss", [False, True])
def test_evaluation_is_that_with_all_logits(has_z_loss: bool) -> None:
    config = Case(1, 1, 1, 1).config("gpt2")
    config = with_z_loss(config) if has_z_loss else config
    expected, found = (run_ranks(evaluate, 1, c, timeout_s=120)[0] for c in (config, chunked(config)))
    assert found == pytest.approx(expected, rel=1e-5) and found["causal_lm_accuracy"] > 0
    assert found["perplexity"] == pytest.approx(math.exp(found["causal_lm_loss"]))
    squares = found.get("causal_lm_z_loss", 0.0)
    assert (squares > 1.0) == has_z_loss and "causal_lm_z_accuracy" not in found
    assert found["loss"] == pytest.approx(found["causal_lm_loss"] + 0.02 * squares)

"""Parts of an engine: DeepSpeed's settings, what a rank holds of a parameter, values without an optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.parameters import Normal, ParameterFacts
from ctxlm_ds.parallel.placement import VOCABULARY, Split
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.json_source import NEVER_PRINT_STEPS
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig, TrainingConfig
from ctxlm_ds.training.engine.model_setup import engine_settings, holding_of, parallel_context, write_frozen
from tests.sections import model_section

WHOLE = ParameterFacts(Normal(1.0), decays=True)
ROWS = ParameterFacts(Normal(1.0), decays=True, split=Split("rows", (2, 4)))
WORDS = ParameterFacts(Normal(1.0), decays=True, split=VOCABULARY)

JSON: dict[str, Any] = {
    "gradient_clipping": 1.0, "steps_per_print": NEVER_PRINT_STEPS, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "overlap_comm": True}, "pipeline": {"seed_layers": False},
}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engine_clips_and_checks_where_deepspeed_would_not(stage: int) -> None:
    given = copy.deepcopy(JSON)
    found = engine_settings(given, stage, is_pipeline=False)
    assert found["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert found["gradient_clipping"] == (0.0 if stage == 0 else 1.0)
    assert {name: found[name] for name in ("steps_per_print", "zero_optimization", "pipeline")} == {
        name: JSON[name] for name in ("steps_per_print", "zero_optimization", "pipeline")
    }
    assert given == JSON, "the caller's settings stay"


def test_a_pipeline_partitions_no_activations_and_overlaps_nothing() -> None:
    given = copy.deepcopy(JSON)
    found = engine_settings(given, 1, is_pipeline=True)
    assert found["pipeline"] == {"seed_layers": False, "pipe_partitioned": False, "grad_partitioned": False}
    assert found["zero_optimization"] == {"stage": 1, "overlap_comm": False}
    assert found["steps_per_print"] is None and given == JSON
    assert engine_settings({**JSON, "steps_per_print": 7}, 1, is_pipeline=True)["steps_per_print"] == 7


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_rank_s_share_follows_the_layout(dropout: float) -> None:
    config = RunConfig(
        model=model_section(hidden_dropout=dropout, attention_dropout=0.0),
        training=TrainingConfig(seed=5),
        parallel=ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, vocab_multiple=8),
    )
    found = parallel_context(
        config.parallel,
        config.training.seed,
        config.model.drops,
        Topology(tensor_parallel_rank=1, tensor_parallel_size=2),
    )
    assert (found.size, found.rank, found.vocab_multiple, found.splits_tokens) == (2, 1, 8, True)
    assert (found.dropout.seed, found.dropout.enabled) == (5, dropout > 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_split_is_reported_by_the_first_rank(rank: int) -> None:
    parallel, parameter = ParallelContext(2, rank), torch.nn.Parameter(torch.empty(3, 2))
    split = holding_of(parallel, "w", ROWS, (6, 2), parameter)
    assert split.shard.rows == ((rank, rank + 1), (2 + 2 * rank, 4 + 2 * rank)) and not split.tensor_duplicate
    assert holding_of(parallel, "b", WHOLE, (6, 2), parameter).tensor_duplicate == (rank > 0)
    assert not split.stage_duplicate
    parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]
    assert holding_of(parallel, "w", ROWS, (6, 2), parameter).stage_duplicate


@pytest.mark.parametrize("rank", [0, 1])
def test_values_without_an_optimizer_are_a_rank_s_rows(rank: int) -> None:
    value, parallel = torch.arange(10.0).reshape(5, 2), ParallelContext(2, rank)
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    write_frozen(parallel, "word_embeddings.weight", WORDS, value, parameter)
    # Five words on two ranks: three, and two with a row of padding, which stays 0.
    assert parameter.tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [0, 0]]][rank]

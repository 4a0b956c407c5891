"""Parts of an engine: DeepSpeed's settings, what a rank holds of a parameter, values without an optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.parameters import Normal, ParameterFacts
from ctxlm_ds.parallel.placement import VOCABULARY, Split
from ctxlm_ds.recipe.deepspeed import NEVER_PRINT_STEPS
from ctxlm_ds.training.engine.runtime import engine_settings, write_frozen

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


@pytest.mark.parametrize("rank", [0, 1])
def test_values_without_an_optimizer_are_a_rank_s_rows(rank: int) -> None:
    value, parallel = torch.arange(10.0).reshape(5, 2), ParallelContext(2, rank)
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    write_frozen(parallel, "word_embeddings.weight", WORDS, value, parameter)
    # Five words on two ranks: three, and two with a row of padding, which stays 0.
    assert parameter.tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [0, 0]]][rank]

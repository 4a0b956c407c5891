"""Every shipped recipe can be made small, with the widths of its layers."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.apps.verify.parts import FEWEST_BLOCKS, MOST_POSITIONS, MOST_WORDS, smaller
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.load import load_config, shipped_recipes


@pytest.mark.parametrize("stages", [1, 4])
def test_layers_keep_their_widths(stages: int) -> None:
    for name in shipped_recipes():
        config = load_config(name).with_values("parallel", pipeline_parallel_size=stages)
        small, most = smaller(config), max(FEWEST_BLOCKS, stages)
        assert min(most, config.model.num_blocks) <= small.model.num_blocks <= 2 * most, name
        assert small.model.vocab_size is not None and small.model.vocab_size <= MOST_WORDS
        assert small.data.seq_length <= MOST_POSITIONS and small.training.micro_batch_size == 1
        fields = build_objective(small.objective).fields(small.data)
        assert Batch.example(fields, 1, np.random.default_rng(0), 100).fields.keys() == {one.name for one in fields}
        depths = {"vocab_size", *(key for key in type(config.model).model_fields if key.endswith("_layers"))}
        shared = smaller(config.with_values("parallel", context_parallel_size=3))
        assert shared.data.seq_length in (33, config.data.seq_length)
        assert small.model.model_dump(exclude=depths) == config.model.model_dump(exclude=depths), name

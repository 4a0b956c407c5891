"""What autograd saves on ranks that share long rows, against the planner and against one rank."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ctxlm_ds.models.meter import CPU
from ctxlm_ds.parallel.topology import build_topology
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig
from ctxlm_ds.training.engine.runtime import parallel_context
from ctxlm_ds.training.measure import measure
from tests.dist.runner import run_ranks
from tests.unit.training.test_measure import RealRun, config_of

pytestmark = pytest.mark.dist
SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512, "num_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SHAPE, "modernbert": SHAPE, "llama": SHAPE | {"num_key_value_heads": 4},
    "t5": SHAPE | {"head_size": 32},
}  # fmt: skip
DATA = {"llama": {"reset_at_documents": True}}


def config_with(family: str, length: int) -> RunConfig:
    changes = dict(FAMILIES[family])
    if family != "t5":
        changes["max_position_embeddings"] = length
    config = config_of(family, data={"seq_length": length, **DATA.get(family, {})}, **changes)
    if family == "t5":
        config = config.with_values("objective", target_multiple=4)
    return config.with_values("training", global_batch_size=1, micro_batch_size=1)


def saved_bytes(rank: int, world_size: int, config: RunConfig) -> int:
    topology = build_topology(context_parallel_size=world_size)
    parallel = parallel_context(ParallelConfig(), config.training, config.model.drops, topology)
    run = RealRun(config, parallel, rows=1)
    fields = {field.untyped_storage().data_ptr() for field in run.fields.values()}
    run.kept_bytes()
    return sum(kept.untyped_storage().nbytes() for storage, kept in run.kept.items() if storage not in fields)


@cache
def saved(family: str, length: int, context: int) -> int:
    """On the fullest rank."""
    return max(run_ranks(saved_bytes, context, config_with(family, length), timeout_s=500))


def planned(family: str, length: int, context: int) -> int:
    measured = measure(config_with(family, length), platform=CPU, context=context, rows=1)
    return sum(layer.at(1).kept for layer in (*measured.layers, measured.loss))


LENGTHS = [pytest.param(family, 2_048) for family in FAMILIES]
LENGTHS += [
    pytest.param(family, length, marks=pytest.mark.soak)
    for family in FAMILIES for length in ((4_096,) if family == "t5" else (8_192, 32_768))
]  # fmt: skip


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize(("family", "length"), LENGTHS)
def test_ranks_that_share_a_row_save_their_part_of_it(family: str, length: int, context: int) -> None:
    """And the context once more, which the kernel keeps and the output matrix, exchanged."""
    own = saved(family, length, context)
    assert own <= 1.06 * saved(family, length, 1) / context
    assert planned(family, length, context) == pytest.approx(own, rel=0.05)

"""The planned memory of a rank against the most that the tensors of an engine take at one moment of its steps."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.models.meter import CPU
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.schema import KernelsConfig, RunConfig, TrainingConfig
from tests.dist.runner import run_ranks
from tests.dist.training import GLOBAL_BATCH, SEQ_LENGTH, VOCAB, build_engine, step_of, tiny_config
from tests.sections import model_section

pytestmark = pytest.mark.dist


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that were made inside and still exist, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata)
        self.peak = max(self.peak, self.now)
        return out

    def _forget(self, address: int) -> None:
        self.now -= self._known.pop(address)


def peak_of_steps(rank: int, world_size: int, config: RunConfig, user_json: dict[str, Any]) -> int:
    """Most bytes in the second and third step, with the states that the engine made before."""
    with LiveBytes() as live:
        engine = build_engine(config, user_json, config.training.activation_checkpointing)
        engine.train_step(step_of(engine, 0), 0, 0.01)
        live.peak = 0
        for number in (1, 2):
            engine.train_step(step_of(engine, number), number, 0.01)
    return live.peak


def config_of(precision: str, micro_batch_size: int, recompute: bool) -> RunConfig:
    return tiny_config(
        model=model_section(
            family="bert", vocab_size=VOCAB, hidden_size=128, num_layers=4, num_attention_heads=2,
            intermediate_size=512, max_position_embeddings=SEQ_LENGTH, hidden_dropout=0.1, attention_dropout=0.1,
        ),
        training=TrainingConfig(
            global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch_size, precision=precision,
            activation_checkpointing=recompute,
        ),
        kernels=KernelsConfig(linear="torch"),  # CPUs without bfloat16 units compute in float32 copies
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "precision", "micro_batch_size", "recompute"),
    [
        (0, "fp32", 4, False),
        (1, "bf16", GLOBAL_BATCH, False),
        (1, "bf16", GLOBAL_BATCH, True),
        (1, "bf16", 4, False),
        (2, "bf16", 4, False),
    ],
)
def test_the_planned_memory_is_the_peak_of_a_run(
    stage: int, precision: str, micro_batch_size: int, recompute: bool
) -> None:
    config = config_of(precision, micro_batch_size, recompute)
    user_json = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000}}
    (peak,) = run_ranks(peak_of_steps, 1, config, user_json, timeout_s=120)
    planner = Planner(config, Cluster(find_gpu("H100"), 1, 1), {stage: user_json}, CPU)
    planned = planner.memory(Layout(1, zero_stage=stage, micro_batch_size=micro_batch_size, recompute=recompute))
    assert planned.total == pytest.approx(peak, rel=0.05)

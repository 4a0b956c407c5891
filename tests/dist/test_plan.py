"""The planned memory of a rank against the most that the tensors of an engine take at one moment of its steps."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ctxlm_ds.apps.plan.check_run import layout_of
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.models.meter import CPU
from ctxlm_ds.parallel import cross_entropy
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.schema import KernelsConfig, RunConfig, TrainingConfig
from tests.dist.runner import run_ranks
from tests.dist.training import GLOBAL_BATCH, SEQ_LENGTH, VOCAB, build_engine, step_of, tiny_config
from tests.sections import model_section

pytestmark = pytest.mark.dist
WORDS = 8192
CHUNK = cross_entropy.TILE * WORDS
"""Most logits that are held together here."""


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages that were made inside and still exist, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
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
    """Most bytes in a later step, with the states that the engine made before.

    It is the least of three steps: on a busy machine a tensor may live a moment longer, which only adds.
    """
    cross_entropy.CPU_CHUNK = CHUNK
    with LiveBytes() as live:
        engine = build_engine(config, user_json, config.training.activation_checkpointing)
        engine.train_step(step_of(engine, 0), 0, 0.01)
        peaks = []
        for number in (1, 2, 3):
            live.peak = 0
            engine.train_step(step_of(engine, number), number, 0.01)
            peaks.append(live.peak)
    return min(peaks)


def config_of(
    precision: str, micro_batch_size: int, recompute: bool, kernels: dict[str, str], family: str = "bert", **model: Any
) -> RunConfig:
    sizes = {"vocab_size": VOCAB, "hidden_activation": "gelu_tanh" if family == "gpt2" else "gelu"} | model
    return tiny_config(
        family,
        model=model_section(
            family=family, **sizes, hidden_size=128, num_layers=4, num_attention_heads=2,
            intermediate_size=512, max_position_embeddings=SEQ_LENGTH, hidden_dropout=0.1, attention_dropout=0.1,
        ),
        training=TrainingConfig(
            global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch_size, precision=precision,
            activation_checkpointing=recompute,
        ),
        kernels=KernelsConfig(**kernels),
    )  # fmt: skip


@pytest.mark.parametrize("linear", ["torch", "float32"])
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
    stage: int, precision: str, micro_batch_size: int, recompute: bool, linear: str
) -> None:
    """With either product of matrices, of which `auto` takes the one that is faster on this CPU."""
    config = config_of(precision, micro_batch_size, recompute, {"linear": linear})
    assert planned_bytes(config, stage) == pytest.approx(peak_of(config, stage), rel=0.05)


@pytest.mark.parametrize(("micro_batch_size", "z_loss"), [(4, 0.0), (GLOBAL_BATCH, 1e-4)])
def test_the_planned_memory_of_many_words_is_that_of_a_chunk_of_logits(
    micro_batch_size: int, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the 16 rows of 16 positions are a chunk; 4 rows are less."""
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK", CHUNK)
    kernels = {"linear": "torch", "cross_entropy": "chunked"}
    config = config_of("bf16", micro_batch_size, False, kernels, "gpt2", vocab_size=WORDS)
    config = config.with_values("objective", z_loss=z_loss)
    assert planned_bytes(config, 1) == pytest.approx(peak_of(config, 1), rel=0.05)
    if micro_batch_size == GLOBAL_BATCH:
        assert planned_bytes(config, 1) < 0.9 * planned_bytes(config.with_values("kernels", cross_entropy="full"), 1)


@pytest.mark.parametrize(("stage", "recompute"), [(1, False), (2, True)])
def test_the_planned_memory_of_shared_rows_is_the_peak_of_each_rank(stage: int, recompute: bool) -> None:
    """ZeRO's partitions are those of all copies of the weights."""
    alone = config_of("bf16", GLOBAL_BATCH, recompute, {"linear": "torch"})
    config = alone.with_values("parallel", context_parallel_size=2)
    for peak in run_ranks(peak_of_steps, 2, config, json_of(stage), timeout_s=120):
        assert planned_bytes(config, stage) == pytest.approx(peak, rel=0.05)
    assert planned_bytes(config, stage) < 0.8 * planned_bytes(alone, stage)


def json_of(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000}}


def planned_bytes(config: RunConfig, stage: int) -> int:
    planner = Planner(config, Cluster(find_gpu("H100"), 1, 1), {stage: json_of(stage)}, CPU)
    return planner.memory(layout_of(config.parallel, config.training, stage, 1)).total


def peak_of(config: RunConfig, stage: int) -> int:
    peak: int = run_ranks(peak_of_steps, 1, config, json_of(stage), timeout_s=120)[0]
    return peak

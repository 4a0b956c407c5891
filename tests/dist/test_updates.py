"""Planned bytes of gradients and updates against those that the operations of an engine read and write."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.apps.plan.states import Partition
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig
from ctxlm_ds.training.engine import zero_optimizers
from tests.dist.forks import fork_ranks
from tests.dist.training import GLOBAL_BATCH, SEQ_LENGTH, VOCAB, build_engine, step_of, tiny_config
from tests.sections import model_section

pytestmark = pytest.mark.dist
ONLY_WRITTEN = ("copy_", "zero_", "fill_")
NOT_MOVED = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view")
PRODUCTS = ("bmm", "baddbmm")


class MovedBytes(TorchDispatchMode):
    """Counts what each operation reads and writes; a tensor that is read twice by one operation counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or func.namespace != "aten" or name in NOT_MOVED:
            return out
        read: dict[int, int] = {}
        written: dict[int, int] = {}
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else (kwargs or {}).get(argument.name)
            # Fused optimizers unscale gradients in place if they are given a scale.
            is_written = argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
            sizes = {id(x): x.numel() * x.element_size() for x in tree_leaves(value) if isinstance(x, torch.Tensor)}
            if is_written:
                written |= sizes
            if not is_written or (name not in ONLY_WRITTEN and argument.name != "out"):
                read |= sizes
        if not written:
            written = {id(x): x.numel() * x.element_size() for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        self.found[name] += sum(read.values()) + sum(written.values())
        return out


def add_as_on_a_gpu(total: torch.Tensor, first: torch.Tensor | None, gradient: torch.Tensor) -> None:
    """The sums that the planner counts; compiled loops are no operations of torch."""
    if first is not None:
        total.copy_(first)
    total.add_(gradient)


def count_in_step(rank: int, world_size: int, config: RunConfig, user_json: dict[str, Any]) -> tuple[int, int]:
    """Bytes of sums and reduction, and of the update, in the third step."""
    zero_optimizers._add_on_cpu = add_as_on_a_gpu
    engine = build_engine(config, user_json)
    found: dict[str, Counter[str]] = {"gradients": Counter(), "update": Counter()}

    def watch(owner: Any, name: str, part: str) -> None:
        method = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with MovedBytes() as moved:
                result = method(*args, **kwargs)
            found[part].update(moved.found)
            return result

        setattr(owner, name, watched)

    zero = engine._zero
    # Called by the hooks of parameters, which hold the class's function.
    watch(type(zero), "accumulate_hp_grads_and_remove_lp", "gradients") if hasattr(zero, "bf16_groups") else None
    if hasattr(zero, "reduce_ready_partitions_and_remove_grads"):
        watch(zero, "reduce_ready_partitions_and_remove_grads", "gradients")
    watch(engine._deepspeed, "allreduce_gradients", "gradients")
    watch(engine._updater, "end_step", "update")
    for step in range(3):
        for counter in found.values():
            counter.clear()
        engine.train_step(step_of(engine, step), step, 0.01)
    products = sum(found["update"][name] for name in PRODUCTS)
    return sum(found["gradients"].values()), sum(found["update"].values()) - products


def config_of(precision: str, optimizer: str, micro_batch_size: int) -> RunConfig:
    """A model of half a million parameters, whose step always clips."""
    return tiny_config(
        model=model_section(
            family="bert", vocab_size=VOCAB, hidden_size=128, num_layers=2, num_attention_heads=2,
            intermediate_size=512, max_position_embeddings=SEQ_LENGTH, hidden_dropout=0.0, attention_dropout=0.0,
        ),
        optimizer=choices.OPTIMIZER.make(name=optimizer, learning_rate=0.01, weight_decay=0.1, gradient_clipping=1e-3),
        training=TrainingConfig(
            global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch_size, precision=precision
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "precision", "optimizer", "micro_batch_size", "error"),
    [
        (1, "bf16", "adamw", GLOBAL_BATCH, 0.01),
        (1, "bf16", "adamw", 4, 0.01),
        (1, "bf16", "lamb", 4, 0.01),
        (1, "bf16", "stable_adamw", 4, 0.01),
        (1, "bf16", "muon", 4, 0.02),
        (1, "bf16", "adafactor", 4, 0.02),
        (1, "bf16", "adagrad", 4, 0.02),
        (0, "fp32", "adamw", GLOBAL_BATCH, 0.01),
        (1, "fp32", "adamw", GLOBAL_BATCH, 0.01),
        (2, "fp32", "adamw", 4, 0.01),
        (2, "bf16", "adamw", GLOBAL_BATCH, 0.15),
        (2, "bf16", "adamw", 4, 0.1),
        (3, "bf16", "adamw", 4, 0.1),
    ],
)
def test_moved_bytes_are_those_of_the_operations(
    stage: int, precision: str, optimizer: str, micro_batch_size: int, error: float
) -> None:
    config, user_json = config_of(precision, optimizer, micro_batch_size), {"zero_optimization": {"stage": stage}}
    ((gradients, update),) = fork_ranks(count_in_step, 1, config, user_json, timeout_s=120)
    layout = Layout(1, zero_stage=stage, micro_batch_size=micro_batch_size)
    planner = Planner(config, Cluster(find_gpu("H100"), 1, 1), {stage: user_json})
    (cut,) = planner.stages(layout)
    sizes, partition = cut.parameters, Partition(config.training, config.optimizer, planner.zero[stage], 1)
    planned_gradients = partition.gradient_bytes(sizes, GLOBAL_BATCH // micro_batch_size)
    # DeepSpeed divides an empty bucket by a number.
    assert planned_gradients == pytest.approx(gradients, rel=error, abs=8)
    assert partition.update_bytes(sizes) == pytest.approx(update, rel=error)


def test_ranks_share_the_update_and_not_the_sums() -> None:
    config, user_json = config_of("bf16", "adamw", 4), {"zero_optimization": {"stage": 1}}
    planner = Planner(config, Cluster(find_gpu("H100"), 1, 2), {1: user_json})
    (cut,) = planner.stages(Layout(2, micro_batch_size=4))
    one, two = (Partition(config.training, config.optimizer, planner.zero[1], ranks) for ranks in (1, 2))
    sizes = cut.parameters
    planned_gradients = two.gradient_bytes(sizes, 2)
    for found in fork_ranks(count_in_step, 2, config, user_json, timeout_s=120):
        assert two.update_bytes(sizes) == pytest.approx(found[1], rel=0.01)
        # gloo's reduce-scatter and the average of the own partition are not counted.
        assert planned_gradients == pytest.approx(found[0], rel=0.5)
        assert planned_gradients == one.gradient_bytes(sizes, 2)

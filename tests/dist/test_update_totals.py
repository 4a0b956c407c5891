"""A step of any layout has one collective of its own and one read by the host, and none on the CPU's group."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.engine import update
from ctxlm_ds.training.loop.state import Ahead
from tests.dist.runner import run_ranks
from tests.dist.states import Layout
from tests.dist.training import build_engine, step_of

pytestmark = pytest.mark.dist
RATE = 0.01
CPU_COLLECTIVES = (
    "all_gather_object", "gather_object", "broadcast_object", "all_reduce_sum", "all_reduce_max",
)  # fmt: skip


class DeviceReads(TorchDispatchMode):
    """Where a value of a tensor was read by the host, but of tensors that were made from `on_host`."""

    def __init__(self) -> None:
        super().__init__()
        self.on_host: list[torch.Tensor] = []
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if tensors and all(any(tensor is known for known in self.on_host) for tensor in tensors):
            self.on_host += [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        elif func is torch.ops.aten._local_scalar_dense.default:
            frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            self.places.append(f"{frames[-2].filename}:{frames[-2].lineno}")
        return found


def forbid(name: str) -> Callable[..., Any]:
    def called(*_: Any) -> Any:
        raise AssertionError(f"{name} in a training step")

    return called


def count_in_steps(rank: int, world_size: int, layout: Layout) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        return watched(layout, rank, patch)


def watched(layout: Layout, rank: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Vectors that each step adds up, its reads of the updater, other reads, and the flags."""
    config = layout.config()
    # The kernels of other devices: those of CPUs read their keys.
    kernels = config.kernels.model_copy(update={"attention": "sdpa", "dropout": "torch"})
    engine = build_engine(config.model_copy(update={"kernels": kernels}), layout.user_json())
    for name in CPU_COLLECTIVES:
        patch.setattr(Topology, name, forbid(name))
    add, read = Topology.add_on_device, update._read_together
    vectors: list[int] = []
    reads: list[int] = []
    found: dict[str, Any] = {"vectors": [], "reads": [], "others": [], "flags": []}

    def counted_add(self: Topology, values: torch.Tensor) -> torch.Tensor:
        vectors.append(values.numel())
        return add(self, values)

    patch.setattr(Topology, "add_on_device", counted_add)
    steps = [step_of(engine, number) for number in range(4)]
    for number in range(3):
        watch = DeviceReads()

        def counted_read(figures: torch.Tensor, norms: Any, watch: DeviceReads = watch) -> torch.Tensor:
            reads.append(1)
            host = read(figures, norms)
            watch.on_host.append(host)
            return host

        patch.setattr(update, "_read_together", counted_read)
        ahead = Ahead(steps[number + 1], (float(rank), 1.0))
        with watch:
            result = engine.train_step(steps[number], number, RATE, look_ahead=lambda ahead=ahead: ahead)
        found["flags"].append(result.flags)
        found["vectors"].append(len(vectors))
        found["reads"].append(len(reads))
        found["others"].append(watch.places)
        vectors.clear()
        reads.clear()
    return found


LAYOUTS = [
    Layout(2, 0), Layout(2, 3, "bf16"), Layout(2, 1, "bf16", tensor=2), Layout(2, 1, "bf16", pipeline=2),
    *(pytest.param(Layout(2, stage, "bf16"), marks=pytest.mark.soak) for stage in (1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_waits_for_the_device_once(layout: Layout) -> None:
    world_size = layout.world_size
    for found in run_ranks(count_in_steps, world_size, layout, timeout_s=120):
        # The first step has nobody that told of its counts.
        assert found["vectors"] == [2, 1, 1]
        assert found["reads"] == [1, 1, 1]
        assert found["others"][1:] == [[], []]
        assert found["flags"] == [(sum(range(world_size)), world_size)] * 3


def ahead_and_not(rank: int, world_size: int, layout: Layout) -> tuple[list[Any], list[Any]]:
    """Results of steps that knew their counts from the step before, and of steps that added them up themselves."""
    results: tuple[list[Any], list[Any]] = ([], [])
    for looks, found in zip((True, False), results, strict=True):
        engine = build_engine(layout.config(), layout.user_json())
        steps = [step_of(engine, number) for number in range(4)]
        for number in range(3):
            ahead = Ahead(steps[number + 1]) if looks else Ahead()
            found.append(engine.train_step(steps[number], number, RATE, look_ahead=lambda ahead=ahead: ahead))
    return results


@pytest.mark.parametrize("layout", [Layout(2, 0), Layout(4, 1, "bf16", tensor=2), Layout(4, 1, pipeline=2)], ids=str)
def test_counts_from_the_step_before_change_no_number(layout: Layout) -> None:
    for ahead, alone in run_ranks(ahead_and_not, layout.world_size, layout, timeout_s=180):
        assert ahead == alone

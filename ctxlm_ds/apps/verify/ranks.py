"""Count what a rank of each pipeline stage sends in a step, by DeepSpeed's engine in a process group of all ranks.

The group sends nothing, so that one process is any rank of thousands. The engine is that of a run, on a CPU, with a
smaller model (parts.py). A stage receives what the stage before it sent. It runs as a separate process:

    python -m ctxlm_ds.apps.verify.ranks < a JSON with recipe, deepspeed (its JSON) and num_ranks
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ctxlm_ds import run
from ctxlm_ds.apps.plan.check_run import layout_of
from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.apps.plan.timing import StageLoad
from ctxlm_ds.apps.verify.parts import smaller
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.models.meter import CPU
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel import topology as topologies
from ctxlm_ds.parallel.topology import Topology, build_topology
from ctxlm_ds.process.launch import quiet_libraries
from ctxlm_ds.process.patches import replaced
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.layout import layout_problems
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig
from ctxlm_ds.recipe.zero import ZeroSettings
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.engine.runtime import init_process_group

MICRO_BATCHES = 2
STEPS, STEPS_OF_STAGE_3 = 2, 3
"""The last is counted: a pipeline sends shapes in the first, stage 3 of ZeRO learns the order of layers in two."""
SCALAR_BYTES = 8
"""Ranks of a pipeline agree on norms and losses in single numbers, which the plan leaves out."""
COLLECTIVES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
NOT_LOGGED = "gradient norm", "tied layer"
"""Purposes of messages that the project sends itself, past DeepSpeed's logger, if there is a pipeline."""
Bytes = dict[str, int]


class LonelyTopology(Topology):
    """A rank that decides alone what ranks agree on outside of a step."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    gather_object = all_gather_object

    def broadcast_object(self, value: Any) -> Any:
        return value

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().to(device="cpu", dtype=torch.float64, copy=True)

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        return list(values)


@contextmanager
def rank_of(parallel: ParallelConfig, rank: int, num_ranks: int) -> Iterator[Topology]:
    """Make this process one rank of `num_ranks`, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ctxlm_ds.parallel.megatron import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        init_process_group()
        with replaced(topologies, "_gloo_group", lambda: None):
            sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.context_parallel_size
            found = build_topology(0, 1, *sizes)
        yield LonelyTopology(**{field.name: getattr(found, field.name) for field in fields(Topology)})
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class Wire:
    """What pipeline stages send each other: a stage's activations become what the next one receives."""

    def __init__(self, send: Callable[[torch.Tensor, int], object]) -> None:
        self._send = send
        self.arriving: list[torch.Tensor] = []
        self._leaving: list[torch.Tensor] = []
        self._next_stage = 0

    def begin(self, stage: int) -> None:
        """Begin with a stage; what the one before sent onwards arrives."""
        self.arriving, self._leaving, self._next_stage = self._leaving, [], stage + 1

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Send, and keep what goes to the next stage."""
        if stage == self._next_stage:
            self._leaving.append(tensor.detach().clone())
        self._send(tensor, stage)

    def receive(self, tensor: torch.Tensor, stage: int) -> None:
        """Fill a gradient of the next stage with zeros, and another tensor with what arrives."""
        if stage == self._next_stage:
            tensor.zero_()
        else:
            tensor.copy_(self.arriving.pop(0))


def messages_of_a_step(engine: Engine, steps: Sequence[Step]) -> tuple[Bytes, Bytes]:
    """Return the bytes that DeepSpeed's logger counts in the last of the steps, and those of its layers."""
    import deepspeed.comm.comm as deepspeed_comm

    logged: list[tuple[str, int]] = []
    is_pipeline = engine.topology.pipeline_parallel_size > 1

    def append(operation: str, record: str, latency: float, num_bytes: float) -> None:
        logged.append((operation, int(num_bytes)))

    with replaced(deepspeed_comm.comms_logger, "append", append):
        for number, step in enumerate(steps):
            logged.clear()
            engine.parallel.traffic.reset()
            engine.train_step(step, number, 1e-4)
    sent: Counter[str] = Counter()
    for operation, num_bytes in logged:
        is_scalar = is_pipeline and operation == "all_reduce" and num_bytes <= SCALAR_BYTES
        if operation not in ("recv", "broadcast") and not is_scalar:
            sent[COLLECTIVES.get(operation, operation)] += num_bytes
    return dict(sent), {name: size for name, size in engine.parallel.traffic.num_bytes.items() if size}


def planned(loads: Sequence[StageLoad], stage: int) -> tuple[Bytes, Bytes]:
    """Return the planner's bytes of a step on a rank of a stage: what DeepSpeed logs, and those of its layers."""
    of_layers: Counter[str] = Counter()
    logged: Counter[str] = Counter()
    for message in loads[stage].messages:
        if message.counted:
            of_layers[message.counted] += int(message.num_bytes)
        elif message.operation != "send" and (len(loads) == 1 or message.purpose not in NOT_LOGGED):
            logged[message.operation] += int(message.num_bytes)
    cuts = [(stage, "tensors")] if stage < len(loads) - 1 else []
    cuts += [(stage - 1, "gradients")] if stage > 0 else []
    for cut, purpose in cuts:
        crossing = (m for m in loads[cut].messages if m.axis == "pipeline" and m.purpose == purpose)
        logged["send"] += sum(int(message.num_bytes) for message in crossing)
    return {name: size for name, size in logged.items() if size}, dict(of_layers)


def count(config: RunConfig, settings: dict[str, Any], layout: Layout) -> Iterator[dict[str, Any]]:
    """Yield for each stage of a smaller recipe what its first rank sends in a step, and what the planner counts."""
    from deepspeed.runtime.pipe import p2p

    zero_stage = layout.zero_stage
    planner = Planner(config, Cluster(find_gpu("A100-80"), 1, layout.world_size), {zero_stage: settings}, CPU)
    loads = [planner.load(layout, index) for index in range(layout.pipeline)]
    logged = {**settings, "comms_logger": {"enabled": True, "verbose": False, "prof_all": True}}
    draws, wire = np.random.default_rng(0), Wire(p2p.send)
    objective = build_objective(config.objective)
    rows = objective.fields(config.data)
    assert config.model.vocab_size is not None
    batches = [Batch.example(rows, 1, draws, config.model.vocab_size) for _ in range(MICRO_BATCHES)]
    counts = dict.fromkeys([term.name for term in objective.terms], 1)
    step = Step(batches, counts, 1, config.training.global_batch_size, 0)
    num_steps = STEPS_OF_STAGE_3 if zero_stage == 3 else STEPS
    load_frozen = Engine.load_frozen

    def load(engine: Engine, value_of: Any) -> None:
        load_frozen(engine, lambda name: engine.program.initial_value(name, config.training.seed))

    for stage in range(layout.pipeline):
        with rank_of(config.parallel, stage * (layout.world_size // layout.pipeline), layout.world_size) as topology:
            with replaced(run, "teacher_values", lambda path: None), replaced(Engine, "load_frozen", load):
                engine = run.engine_builder(config, logged, objective, topology)()
            run.initialize_weights(engine)
            wire.begin(stage)
            with replaced(p2p, "send", wire.send), replaced(p2p, "recv", wire.receive):
                found, of_layers = messages_of_a_step(engine, [step] * num_steps)
        assert not wire.arriving, f"stage {stage} did not receive all that stage {stage - 1} sent"
        yield {"stage": stage, "sent": [found, of_layers], "planned": list(planned(loads, stage))}


def main() -> None:
    given = json.load(sys.stdin)
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}  # DeepSpeed reads them when it is imported
    quiet_libraries()
    num_ranks, user_json = given["num_ranks"], given["deepspeed"]
    config = smaller(RunConfig.model_validate(given["recipe"]))
    if build_objective(config.objective).teacher_outputs and config.teacher.model is None:
        sys.exit("the teacher is unknown; set teacher.path")
    batch = MICRO_BATCHES * config.parallel.data_parallel_size(num_ranks)
    config = config.with_values("training", global_batch_size=batch)
    for place in ("offload_optimizer", "offload_param"):
        user_json.get("zero_optimization", {}).pop(place, None)
    settings = build_deepspeed_config(config, user_json, num_ranks)
    layout = layout_of(config.parallel, config.training, ZeroSettings.of_json(settings).stage, num_ranks)
    problem = next(layout_problems(config, num_ranks, layout.zero_stage), None)
    if problem is not None:
        sys.exit(f"the step is counted with rows of {config.data.seq_length} positions: {problem.path}: {problem.text}")
    print(json.dumps(list(count(config, settings, layout))))


if __name__ == "__main__":
    main()

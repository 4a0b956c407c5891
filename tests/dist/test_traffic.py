"""Planned traffic against what is really sent: DeepSpeed's comms logger for data parallelism and pipelines, the
project's own counter for tensor and context parallelism. Bytes of a step, equal to the last one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ctxlm_ds.apps.plan.check_run import layout_of
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.apps.plan.timing import StageLoad
from ctxlm_ds.models.meter import CPU
from ctxlm_ds.parallel.context import CONTEXT
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig, TrainingConfig
from tests.dist.runner import run_ranks
from tests.dist.training import GLOBAL_BATCH, SEQ_LENGTH, SLOTS, build_engine, step_of, tiny_config
from tests.sections import data_section, objective_section

OPERATIONS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
SCALAR_BYTES = 8
"""A pipeline's ranks agree on norms and losses in single numbers, which the plan leaves out."""
Bytes = dict[str, int]


def train_and_log(
    rank: int, world_size: int, config: RunConfig, user_json: dict[str, Any]
) -> tuple[list[tuple[str, int]], Bytes]:
    """The logger's (operation, message bytes) and the tensor-parallel bytes of the third step: the first two of
    stage 3 record the order of its modules.
    """
    import deepspeed.comm.comm as deepspeed_comm

    logged = {**user_json, "comms_logger": {"enabled": True, "verbose": False, "prof_all": True}}
    engine = build_engine(config, logged, config.training.activation_checkpointing)
    messages: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        log = lambda raw, record, latency, size: messages.append((raw, int(size)))  # noqa: E731
        patch.setattr(deepspeed_comm.comms_logger, "append", log)
        for step in range(3):
            messages.clear()
            engine.parallel.traffic.reset()
            engine.train_step(step_of(engine, step), step, 0.01)
    return messages, dict(engine.parallel.traffic.num_bytes)


def summed(messages: list[tuple[str, int]], at_least: int = 0) -> Bytes:
    totals: Counter[str] = Counter()
    for operation, size in messages:
        if size > at_least and operation not in ("recv", "broadcast"):
            totals[OPERATIONS.get(operation, operation)] += size
    return dict(totals)


def planned_loads(config: RunConfig, user_json: dict[str, Any], world_size: int) -> list[StageLoad]:
    stage = user_json["zero_optimization"]["stage"]
    layout = layout_of(config.parallel, config.training, stage, world_size)
    planner = Planner(config, Cluster(find_gpu("A100-80"), 1, world_size), {stage: user_json}, CPU)
    return [planner.load(layout, index) for index in range(layout.pipeline)]


def planned(load: StageLoad, *axes: str) -> Bytes:
    totals: Counter[str] = Counter()
    for message in load.messages:
        if message.axis in axes and message.num_bytes:
            totals[message.operation] += int(message.num_bytes)
    return dict(totals)


def config_of(
    precision: str,
    accumulation: str = "fp32",
    recompute: bool = False,
    micro_batch_size: int = 4,
    family: str = "bert",
    **parallel: Any,
) -> RunConfig:
    training = TrainingConfig(
        global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch_size, precision=precision,
        grad_accum_dtype=accumulation, activation_checkpointing=recompute,
    )  # fmt: skip
    if family != "bert":
        return tiny_config(family, training=training, parallel=ParallelConfig(**parallel))
    return tiny_config(
        training=training,
        parallel=ParallelConfig(**parallel),
        data=data_section(seq_length=SEQ_LENGTH),
        objective=objective_section(max_predictions=SLOTS),
    )


def settings(stage: int, **zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **zero}}


NEVER_KEPT = {
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "user_json"),
    [
        (config_of("fp32"), settings(0)),
        (config_of("fp32", micro_batch_size=8), settings(1)),
        (config_of("bf16"), settings(1)),
        pytest.param(config_of("bf16", "bf16"), settings(1), marks=pytest.mark.soak),
        (config_of("bf16", micro_batch_size=2), settings(2, reduce_bucket_size=1000, overlap_comm=True)),
        (config_of("bf16", micro_batch_size=2), settings(3, stage3_param_persistence_threshold=160)),
        (config_of("bf16"), settings(3, **NEVER_KEPT)),
    ],
)
def test_data_parallel_bytes_are_the_comms_loggers(config: RunConfig, user_json: dict[str, Any]) -> None:
    (load,) = planned_loads(config, user_json, 2)
    for messages, _ in run_ranks(train_and_log, 2, config, user_json):
        assert summed(messages) == planned(load, "data")


@pytest.mark.parametrize(
    ("config", "stage"),
    [
        (config_of("fp32", tensor_parallel_size=2), 0),
        (config_of("bf16", recompute=True, tensor_parallel_size=2, sequence_parallel=True), 1),
        (config_of("bf16", tensor_parallel_size=2), 3),
        pytest.param(config_of("fp32", family="gpt2", tensor_parallel_size=2), 1, marks=pytest.mark.soak),
        pytest.param(
            config_of("fp32", family="gpt2", tensor_parallel_size=2, sequence_parallel=True), 1, marks=pytest.mark.soak
        ),
    ],
)
def test_tensor_parallel_bytes_are_the_counters(config: RunConfig, stage: int) -> None:
    (load,) = planned_loads(config, settings(stage), 4)
    for messages, tensor_bytes in run_ranks(train_and_log, 4, config, settings(stage), timeout_s=120):
        assert tensor_bytes == planned(load, "tensor")
        assert summed(messages) == planned(load, "data")


def sharing_rows(family: str, context: int = 2, tensor: int = 1, **changes: Any) -> RunConfig:
    """Four heads, so that 2 x 2 ranks have one each."""
    base = config_of("fp32", family=family, context_parallel_size=context, tensor_parallel_size=tensor, **changes)
    return base.with_values("model", num_attention_heads=4)


BOTH = {"tensor": 2, "sequence_parallel": True, "recompute": True}


@pytest.mark.parametrize(
    ("config", "stage"),
    [
        (sharing_rows("bert"), 1),
        (sharing_rows("gpt2", recompute=True), 2),
        (sharing_rows("bert", **BOTH), 0),
        *(
            pytest.param(config, stage, marks=pytest.mark.soak)
            for config, stage in (
                (sharing_rows("bert", 4, recompute=True), 3), (sharing_rows("bert", micro_batch_size=1), 1),
                (sharing_rows("bert", tensor=2), 2), (sharing_rows("gpt2"), 0), (sharing_rows("gpt2", 4), 3),
                (sharing_rows("gpt2", **BOTH), 1), (sharing_rows("gpt2", tensor=2), 3),
            )
        ),
    ],
)  # fmt: skip
def test_context_parallel_bytes_are_the_counters(config: RunConfig, stage: int) -> None:
    """One row has fewer sequences than ranks: their slots are padded."""
    (load,) = planned_loads(config, settings(stage), 4)
    expected = planned(load, "tensor")
    expected |= {CONTEXT + operation: size for operation, size in planned(load, "context").items()}
    assert expected[CONTEXT + "all_to_all"]
    for messages, sent in run_ranks(train_and_log, 4, config, settings(stage), timeout_s=180):
        assert sent == expected
        assert summed(messages) == planned(load, "data")


@pytest.mark.parametrize(
    ("precision", "stage", "family", "context"),
    [
        ("bf16", 1, "bert", 1),
        pytest.param("fp32", 0, "bert", 1, marks=pytest.mark.soak),
        pytest.param("bf16", 1, "gpt2", 1, marks=pytest.mark.soak),
        pytest.param("bf16", 1, "gpt2", 2, marks=pytest.mark.soak),
    ],
)
def test_pipeline_bytes_are_the_comms_loggers(precision: str, stage: int, family: str, context: int) -> None:
    """Each stage logs what it sends: hidden states and row bounds onwards, gradients back."""
    config = config_of(precision, family=family, pipeline_parallel_size=2, context_parallel_size=context)
    loads = planned_loads(config, settings(stage), 4)
    forward, backward = (m.num_bytes for m in loads[0].messages if m.operation == "send")
    for rank, (messages, _) in enumerate(run_ranks(train_and_log, 4, config, settings(stage), timeout_s=120)):
        found = summed(messages, SCALAR_BYTES)
        assert found.pop("send") == (backward if rank // 2 else forward)
        load = loads[rank // 2]
        # The project adds up tied gradients itself, past DeepSpeed's logger.
        unlogged = sum(int(m.num_bytes) for m in load.messages if m.purpose in ("gradient norm", "tied layer"))
        assert any(m.purpose == "tied layer" for m in load.messages)
        expected = Counter(planned(load, "data", "pipeline")) - Counter({"all_reduce": unlogged})
        expected.pop("send")
        assert found == dict(expected)


@pytest.mark.soak
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_parallel_bytes_of_every_layout(tensor: int, stage: int, split: bool, recompute: bool) -> None:
    base = config_of("fp32", recompute=recompute, tensor_parallel_size=tensor, sequence_parallel=split)
    model = base.model.model_copy(update={"num_attention_heads": 4})
    config = base.model_copy(update={"model": model})
    (load,) = planned_loads(config, settings(stage), 2 * tensor)
    for messages, tensor_bytes in run_ranks(train_and_log, 2 * tensor, config, settings(stage), timeout_s=180):
        assert tensor_bytes == planned(load, "tensor")
        assert summed(messages) == planned(load, "data")

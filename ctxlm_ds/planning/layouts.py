"""One way to lay a recipe over GPUs, and what DeepSpeed's JSON says that memory and traffic depend on.

In: a recipe, a DeepSpeed JSON. Out: Layout, ZeroSettings, a recipe with a layout's settings. Not here: which layouts
are possible (recipe/layout.py), which one is best (search.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.recipe.schema import RunConfig

DEEPSPEED_BUCKET = 500_000_000
"""Elements: DeepSpeed 0.19.8's own bucket, and that of stages 0 and 1 in 16 bits whatever the JSON says."""
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks share a model and a batch."""

    data: int
    tensor: int = 1
    pipeline: int = 1
    zero_stage: int = 1
    micro_batch_size: int = 1
    recompute: bool = False
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.data * self.tensor * self.pipeline

    def num_micro_batches(self, global_batch_size: int) -> int:
        """Micro-batches of a rank in a step."""
        return global_batch_size // (self.data * self.micro_batch_size)

    def apply(self, config: RunConfig) -> RunConfig:
        """The recipe with this layout's settings."""
        parallel: dict[str, Any] = {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "sequence_parallel": self.sequence_parallel,
        }
        training = {"micro_batch_size": self.micro_batch_size, "activation_checkpointing": self.recompute}
        by_hand = config.parallel.pipeline_layers
        if by_hand is not None and len(by_hand) != self.pipeline:
            parallel["pipeline_layers"] = None
        return config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update=parallel),
                "training": config.training.model_copy(update=training),
            }
        )

    def settings(self, config: RunConfig) -> list[str]:
        """`a.b=c` for --set, which give the recipe this layout."""
        settings = [
            f"training.micro_batch_size={self.micro_batch_size}",
            f"training.activation_checkpointing={str(self.recompute).lower()}",
            f"parallel.tensor_parallel_size={self.tensor}",
            f"parallel.pipeline_parallel_size={self.pipeline}",
            f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
        ]
        by_hand = config.parallel.pipeline_layers
        if by_hand is not None and len(by_hand) != self.pipeline:
            settings.append("parallel.pipeline_layers=null")
        return settings


def launch_command(recipe: str, deepspeed: str, settings: Sequence[str], num_nodes: int, gpus_per_node: int) -> str:
    """The command that starts a run, on every node alike.

    Args:
        recipe: as --config takes it.
        deepspeed: as --deepspeed_config takes it.
        settings: `a.b=c` each; later ones win.
        num_nodes: nodes.
        gpus_per_node: ranks on each.
    """
    start = f"torchrun --standalone --nproc-per-node {gpus_per_node}"
    if num_nodes > 1:
        start = (
            f"torchrun --nnodes {num_nodes} --nproc-per-node {gpus_per_node} --rdzv-backend c10d "
            "--rdzv-endpoint $HEAD_NODE:29500"
        )
    quoted = " ".join(shlex.quote(setting) for setting in settings)
    return (
        f"{start} -m ctxlm_ds.pretrain --config {shlex.quote(recipe)} --deepspeed_config {shlex.quote(deepspeed)} "
        f"--set {quoted}"
    )


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """The engine knobs of a DeepSpeed JSON that memory and traffic depend on; sizes in elements."""

    stage: int
    overlap_comm: bool = False
    reduce_bucket: int = DEEPSPEED_BUCKET
    prefetch_bucket: int = 50_000_000
    persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @classmethod
    def of_json(cls, settings: dict[str, Any], width: int | None) -> ZeroSettings:
        """Read a JSON; sizes left "auto" follow from the model's width as recipe/deepspeed.py fills them in."""
        zero = settings.get("zero_optimization", {})
        stage = int(zero.get("stage", 0))
        hints = {} if width is None else {
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": int(0.9 * width * width),
            "stage3_param_persistence_threshold": 10 * width,
        }  # fmt: skip

        def size(name: str, default: int) -> int:
            value = zero.get(name, default)
            return int(hints.get(name, default) if value == "auto" else value)

        def offloads(name: str) -> bool:
            return zero.get(name, {}).get("device", "none") not in ("none", None)

        return cls(
            stage=stage,
            overlap_comm=bool(zero.get("overlap_comm", stage == 3)),
            reduce_bucket=size("reduce_bucket_size", DEEPSPEED_BUCKET),
            prefetch_bucket=size("stage3_prefetch_bucket_size", 50_000_000),
            persistence_threshold=size("stage3_param_persistence_threshold", 100_000),
            max_live_parameters=size("stage3_max_live_parameters", 1_000_000_000),
            max_reuse_distance=size("stage3_max_reuse_distance", 1_000_000_000),
            offload_optimizer=offloads("offload_optimizer"),
            offload_parameters=offloads("offload_param"),
        )

"""One layout of a recipe on GPUs, and the values of DeepSpeed's JSON that memory and traffic depend on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.recipe.deepspeed import bucket_hints
from ctxlm_ds.recipe.hardware import Cluster
from ctxlm_ds.recipe.schema import RunConfig

DEEPSPEED_BUCKET = 500_000_000
"""Elements of DeepSpeed 0.19.8's default bucket; stages 0 and 1 in 16 bits always use it."""
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

    def __str__(self) -> str:
        text = f"dp {self.data}, tp {self.tensor}, pp {self.pipeline}, ZeRO {self.zero_stage}"
        text += f", micro-batch {self.micro_batch_size}{', recomputation' if self.recompute else ''}"
        return text + (", sequence parallelism" if self.sequence_parallel else "")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.pipeline

    def num_micro_batches(self, global_batch_size: int) -> int:
        """Return the micro-batches of a rank in a step."""
        return global_batch_size // (self.data * self.micro_batch_size)

    def _changes(self, config: RunConfig) -> dict[str, dict[str, Any]]:
        parallel: dict[str, Any] = {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "sequence_parallel": self.sequence_parallel,
        }
        by_hand = config.parallel.pipeline_layers
        if by_hand is not None and len(by_hand) != self.pipeline:
            parallel["pipeline_layers"] = None
        training = {"micro_batch_size": self.micro_batch_size, "activation_checkpointing": self.recompute}
        return {"training": training, "parallel": parallel}

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the recipe with this layout's settings."""
        changes = self._changes(config)
        return config.model_copy(
            update={section: getattr(config, section).model_copy(update=new) for section, new in changes.items()}
        )

    def settings(self, config: RunConfig) -> list[str]:
        """Return this layout's settings as `a.b=c` for --set."""
        return [
            f"{section}.{name}={json.dumps(value)}"
            for section, new in self._changes(config).items()
            for name, value in new.items()
        ]


def launch_command(recipe: str, deepspeed: str, settings: Sequence[str], cluster: Cluster) -> str:
    """Return the command that starts a run, the same one on every node.

    Args:
        recipe: value of --config.
        deepspeed: value of --deepspeed_config.
        settings: values of --set; later ones win.
        cluster: nodes and GPUs, one rank each.
    """
    ranks = f"--nproc-per-node {cluster.gpus_per_node}"
    start = f"torchrun --standalone {ranks}"
    if cluster.num_nodes > 1:
        start = f"torchrun --nnodes {cluster.num_nodes} {ranks} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    options = ["--config", recipe, "--deepspeed_config", deepspeed, "--set", *settings]
    return f"{start} -m ctxlm_ds.pretrain {shlex.join(options)}"


@dataclass(frozen=True)
class ZeroSettings:
    """The values of a DeepSpeed JSON that memory and traffic depend on; sizes in elements."""

    stage: int
    overlap_comm: bool
    reduce_bucket: int
    prefetch_bucket: int
    persistence_threshold: int
    max_reuse_distance: int
    offload_optimizer: bool
    offload_parameters: bool

    @classmethod
    def of_json(cls, settings: dict[str, Any], width: int | None) -> ZeroSettings:
        """Read a JSON; "auto" sizes follow from the model's width."""
        zero = settings.get("zero_optimization", {})
        stage = int(zero.get("stage", 0))
        sizes = {name: value for name, value in zero.items() if value != "auto"}
        sizes |= {name: size for name, size in bucket_hints(width).items() if zero.get(name) == "auto"}
        offloads = [zero.get(f"offload_{part}", {}).get("device", "none") for part in ("optimizer", "param")]
        return cls(
            stage=stage,
            overlap_comm=bool(zero.get("overlap_comm", stage == 3)),
            reduce_bucket=int(sizes.get("reduce_bucket_size", DEEPSPEED_BUCKET)),
            prefetch_bucket=int(sizes.get("stage3_prefetch_bucket_size", 50_000_000)),
            persistence_threshold=int(sizes.get("stage3_param_persistence_threshold", 100_000)),
            max_reuse_distance=int(sizes.get("stage3_max_reuse_distance", 1_000_000_000)),
            offload_optimizer=offloads[0] not in ("none", None),
            offload_parameters=offloads[1] not in ("none", None),
        )

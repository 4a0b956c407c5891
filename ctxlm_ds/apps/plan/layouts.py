"""One layout of a recipe on GPUs, and the values of DeepSpeed's JSON that memory and traffic depend on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.recipe.hardware import Cluster

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
    context: int = 1

    def __str__(self) -> str:
        rows = f"dp {self.data}, cp {self.context}" if self.context > 1 else f"dp {self.data}"
        text = f"{rows}, tp {self.tensor}, pp {self.pipeline}, ZeRO {self.zero_stage}"
        text += f", micro-batch {self.micro_batch_size}{', recomputation' if self.recompute else ''}"
        return text + (", sequence parallelism" if self.sequence_parallel else "")

    @property
    def world_size(self) -> int:
        return self.replicas * self.tensor * self.pipeline

    @property
    def replicas(self) -> int:
        """Return the copies of the weights, over which ZeRO partitions and gradients are averaged."""
        return self.data * self.context

    def num_micro_batches(self, global_batch_size: int) -> int:
        return global_batch_size // (self.data * self.micro_batch_size)

    def values(self, pipeline_layers: list[int] | None) -> dict[str, dict[str, Any]]:
        """Return this layout's settings by section; `pipeline_layers` is the setting of the recipe."""
        parallel: dict[str, Any] = {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "sequence_parallel": self.sequence_parallel,
        }
        if pipeline_layers is not None and len(pipeline_layers) != self.pipeline:
            parallel["pipeline_layers"] = None
        training = {"micro_batch_size": self.micro_batch_size, "activation_checkpointing": self.recompute}
        return {"training": training, "parallel": parallel}

    def settings(self, pipeline_layers: list[int] | None) -> list[str]:
        """Return this layout's settings as `a.b=c` for --set."""
        sections = self.values(pipeline_layers)
        return [f"{one}.{name}={json.dumps(value)}" for one, new in sections.items() for name, value in new.items()]


def launch_command(recipe: str, deepspeed: str, settings: Sequence[str], cluster: Cluster) -> str:
    """Return the command that starts a run, the same one on every node; of `settings` of --set later ones win."""
    ranks = f"--nproc-per-node {cluster.gpus_per_node}"
    start = f"torchrun --standalone {ranks}"
    if cluster.num_nodes > 1:
        start = f"torchrun --nnodes {cluster.num_nodes} {ranks} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    options = ["--config", recipe, "--deepspeed_config", deepspeed, "--set", *settings]
    return f"{start} -m ctxlm_ds.pretrain {shlex.join(options)}"

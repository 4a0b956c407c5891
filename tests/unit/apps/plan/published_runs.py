"""Published runs, and their values as the planner predicts them with the constants of any plan.

Sources and known reasons for differences are in docs/planning.md. Rows per GPU that a paper does not state are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import JsonByStage, Plan, Planner
from ctxlm_ds.models.meter import Platform
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig

BEFORE_FLASH_ATTENTION = Platform(keeps_scores=True)
OVERLAPPED: JsonByStage = {
    stage: {"zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 50_000_000}}
    for stage in (0, 1, 2)
}


@dataclass(frozen=True, eq=False)
class PublishedRun:
    """A run, the GPUs it ran on, and the published value."""

    name: str
    source: str
    config: RunConfig
    layout: Layout
    unit: str
    """`days`, or `TFLOP/s` of a GPU (including recomputation if the run recomputed, as published)."""
    published: float
    gpu: str = "V100-32"
    gpus_per_node: int = 8
    second: PublishedRun | None = None
    """A second phase, whose days are added."""

    @property
    def cluster(self) -> Cluster:
        """GPUs that the layout needs."""
        per_node = min(self.gpus_per_node, self.layout.world_size)
        return Cluster(find_gpu(self.gpu), self.layout.world_size // per_node, per_node)

    @cache  # noqa: B019 (runs are made once)
    def plan(self) -> Plan:
        """Return the plan of the run's layout."""
        return Planner(self.config, self.cluster, OVERLAPPED, BEFORE_FLASH_ATTENTION).weigh(self.layout)

    def predicted(self) -> float:
        """Return the predicted value in the published unit."""
        plan = self.plan()
        if self.unit == "days":
            return plan.days + (self.second.predicted() if self.second else 0.0)
        passes = 4 / 3 if self.layout.recompute else 1.0
        return passes * plan.mfu * self.cluster.gpu.tflops_16bit


def _config(recipe: str, length: int, rows: int, steps: int = 1, precision: str = "fp16", **model: int) -> RunConfig:
    """Load a shipped recipe with a published run's batch and shape; these runs held all logits."""
    changes: dict[str, Any] = {
        "data.seq_length": length, "training.global_batch_size": rows, "training.micro_batch_size": 1,
        "training.max_steps": steps, "training.precision": precision, "training.grad_accum_dtype": precision,
        "kernels.cross_entropy": "full",
    }  # fmt: skip
    changes |= {f"model.{name}": value for name, value in model.items()}
    return load_config(recipe, ["phases=[]", *(f"{name}={value}" for name, value in changes.items())])


def _gpt(hidden: int, layers: int, heads: int, length: int, rows: int) -> RunConfig:
    return _config(
        "gpt2-small", length, rows, vocab_size=51_200, hidden_size=hidden, num_layers=layers,
        num_attention_heads=heads, intermediate_size=4 * hidden, max_position_embeddings=length,
    )  # fmt: skip


def _two_phases(
    name: str, source: str, published: float, first: RunConfig, second: RunConfig, data: int, micro: tuple[int, int],
    gpus_per_node: int = 8,
) -> PublishedRun:  # fmt: skip
    """Describe a run of two phases, with the days of both; `micro` are their rows per GPU."""
    layouts = [Layout(data, micro_batch_size=rows) for rows in micro]
    last = PublishedRun("phase 2", "", second, layouts[1], "days", 0, gpus_per_node=gpus_per_node)
    return PublishedRun(name, source, first, layouts[0], "days", published, gpus_per_node=gpus_per_node, second=last)


def _megatron_2021() -> list[PublishedRun]:
    """List Narayanan 2021, table 1: length 2,048, vocabulary 51,200, A100-80; micro-batches are assumed."""
    rows = [
        # parameters, hidden, layers, heads, tensor, pipeline, GPUs, batch, TFLOP/s per GPU, micro-batch (assumed)
        ("1.7B", 2304, 24, 24, 1, 1, 32, 512, 137, 16),
        ("3.6B", 3072, 30, 32, 2, 1, 64, 512, 138, 16),
        ("7.5B", 4096, 36, 32, 4, 1, 128, 512, 142, 16),
        ("18.4B", 6144, 40, 48, 8, 1, 256, 1024, 135, 8),
        ("39.1B", 8192, 48, 64, 8, 2, 512, 1536, 138, 4),
        ("76.1B", 10240, 60, 80, 8, 4, 1024, 1792, 140, 2),
        ("145.6B", 12288, 80, 96, 8, 8, 1536, 2304, 148, 2),
        ("310.1B", 16384, 96, 128, 8, 16, 1920, 2160, 155, 1),
        ("529.6B", 20480, 105, 128, 8, 35, 2520, 2520, 163, 1),
        ("1008B", 25600, 128, 160, 8, 64, 3072, 3072, 163, 1),
    ]
    return [
        PublishedRun(
            f"GPT {size} ({gpus} A100)", "Narayanan 2021, table 1", _gpt(hidden, layers, heads, 2048, batch),
            Layout(gpus // (tensor * pipeline), tensor, pipeline, 1, micro, recompute=True), "TFLOP/s", achieved,
            gpu="A100-80",
        )
        for size, hidden, layers, heads, tensor, pipeline, gpus, batch, achieved, micro in rows
    ]  # fmt: skip


@cache
def published_runs() -> list[PublishedRun]:
    """List all runs."""
    reprinted, deepspeed, shoeybi = "reprinted 2019, origin unchecked", "DeepSpeed 2020, BERT record", "Shoeybi 2019"
    base, large = "bert-base", "bert-large"
    return [
        PublishedRun("RoBERTa 100k steps (1,024 V100)", "Liu 2019", _config("roberta-large", 512, 8192, 100_000),
                     Layout(1024, micro_batch_size=8), "days", 1.0),
        *(
            _two_phases(f"BERT-base (8 V100), in {precision}", reprinted, 12.0,
                        _config(base, 128, 1024, 900_000, precision), _config(base, 512, 256, 100_000, precision),
                        8, (64, 16))
            for precision in ("fp16", "fp32")  # the report does not say in which
        ),
        _two_phases("BERT-large (280 V100)", reprinted, 1.0, _config(large, 128, 1120, 900_000),
                    _config(large, 512, 280, 100_000), 280, (4, 1)),
        _two_phases("BERT-large LAMB (1,024 V100)", deepspeed, 44 / 1440, _config(large, 128, 65_536, 7038),
                    _config(large, 512, 32_768, 1563), 1024, (64, 16), gpus_per_node=16),
        PublishedRun("BERT-large, length 128 (1 V100)", deepspeed, _config(large, 128, 64),
                     Layout(1, micro_batch_size=64), "TFLOP/s", 64.0),
        PublishedRun("BERT-large, length 512 (1 V100)", deepspeed, _config(large, 512, 16),
                     Layout(1, micro_batch_size=16), "TFLOP/s", 53.0),
        PublishedRun("GPT-2 1.2B (1 V100)", shoeybi, _gpt(1536, 40, 16, 1024, 8),
                     Layout(1, micro_batch_size=8, recompute=True), "TFLOP/s", 39.0),
        PublishedRun("GPT-2 8.3B (512 V100)", shoeybi, _gpt(3072, 72, 32, 1024, 512),
                     Layout(64, 8, micro_batch_size=8, recompute=True), "TFLOP/s", 15_100 / 512, gpus_per_node=16),
        *_megatron_2021(),
    ]  # fmt: skip

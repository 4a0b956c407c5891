"""ZeRO's section of a DeepSpeed JSON as typed settings. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.recipe.deepspeed_rules import AUTO

DEEPSPEED_BUCKET = 500_000_000
"""Elements of DeepSpeed 0.19.8's default bucket; stages 0 and 1 in 16 bits always use it."""
OFFLOADS = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class ZeroSettings:
    """The values of a DeepSpeed JSON's section `zero_optimization` that this project reads; sizes in elements."""

    stage: int
    overlap_comm: bool
    reduce_bucket: int
    prefetch_bucket: int
    persistence_threshold: int
    max_reuse_distance: int
    offload_optimizer: bool
    offload_parameters: bool
    nvme_paths: Mapping[str, str]
    """Name of a section that offloads to NVMe -> its folder."""

    @classmethod
    def of_json(cls, settings: Mapping[str, Any], width: int | None = None) -> ZeroSettings:
        """Read a JSON; "auto" sizes follow from the model's width."""
        zero = settings.get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))
        sizes = {name: value for name, value in zero.items() if value != AUTO}
        sizes |= {name: size for name, size in bucket_hints(width).items() if zero.get(name) == AUTO}
        sections = {name: zero.get(name) or {} for name in OFFLOADS}
        offloads = [section.get("device", "none") not in ("none", None) for section in sections.values()]
        return cls(
            stage=stage,
            overlap_comm=bool(zero.get("overlap_comm", stage == 3)),
            reduce_bucket=int(sizes.get("reduce_bucket_size", DEEPSPEED_BUCKET)),
            prefetch_bucket=int(sizes.get("stage3_prefetch_bucket_size", 50_000_000)),
            persistence_threshold=int(sizes.get("stage3_param_persistence_threshold", 100_000)),
            max_reuse_distance=int(sizes.get("stage3_max_reuse_distance", 1_000_000_000)),
            offload_optimizer=offloads[0],
            offload_parameters=offloads[1],
            nvme_paths={name: str(s.get("nvme_path")) for name, s in sections.items() if s.get("device") == "nvme"},
        )


def bucket_hints(width: int | None) -> dict[str, int]:
    """Return ZeRO's sizes for "auto" from the model's width, as Hugging Face's integration chooses them."""
    if width is None:
        return {}
    return {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }

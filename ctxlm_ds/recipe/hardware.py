"""GPUs and clusters: published memory and speeds, and the share of them that training reaches.

Published values are from NVIDIA's data sheets of V100 SXM2 32 GB (2018), A100 SXM4 40 GB (2020) and 80 GB (2021), H100
SXM5 (2022) and H200 SXM (2023): dense tensor-core peaks without sparsity, memory size and bandwidth, NVLink in both
directions together. Links between nodes are those of NVIDIA's servers (DGX-1 and DGX-2: 4 and 8 x 100 Gb/s, counted as
400; DGX A100: 8 x 200; DGX H100 and H200: 8 x 400).
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.problems import Problem, explain_error, nearest_name, raise_problems, show_value
from ctxlm_ds.recipe.yaml_source import read_yaml
from ctxlm_ds.untrusted_json import read_text

GIGA = 1_000_000_000
TERA = 1_000_000_000_000
GIB = 1024**3


Positive = Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Gpu:
    """One kind of GPU. A YAML file with these names describes another one."""

    name: str
    memory_gib: Positive
    """Memory that a process can allocate."""
    tflops_16bit: Positive
    """Dense peak of matrix products in fp16 (and bf16 if `has_bf16`), 1e12 operations per second."""
    tflops_fp32: Positive
    """Dense peak of fp32 products as torch runs them by default (no TF32)."""
    memory_gb_per_s: Positive
    nvlink_gb_per_s: Positive
    """Between GPUs of one node, both directions together (as published)."""
    inter_node_gbit_per_s: Positive
    """Between a node and others, one direction, all adapters together."""
    matrix_efficiency: Annotated[float, Field(gt=0.0, le=1.0)]
    """Share of the peak that large matrix products reach in training."""
    has_bf16: bool = True

    def flops_per_s(self, precision: str) -> float:
        """Return the dense peak in a precision of `training.precision`."""
        return TERA * (self.tflops_fp32 if precision == "fp32" else self.tflops_16bit)


# matrix_efficiency: one constant per generation, see docs/planning.md ("Constants").
GPUS: tuple[Gpu, ...] = (
    Gpu("V100-32", 31.7, 125.0, 15.7, 900.0, 300.0, 400.0, 0.60, has_bf16=False),
    Gpu("A100-40", 39.4, 312.0, 19.5, 1555.0, 600.0, 1600.0, 0.80),
    Gpu("A100-80", 79.1, 312.0, 19.5, 2039.0, 600.0, 1600.0, 0.80),
    Gpu("H100", 79.1, 989.0, 67.0, 3350.0, 900.0, 3200.0, 0.60),
    Gpu("H200", 139.8, 989.0, 67.0, 4800.0, 900.0, 3200.0, 0.60),
)

DEFAULT_EFFICIENCY = 0.55
MEMORY_BANDWIDTH_SHARE = 0.8
"""Share of the published memory bandwidth that long element-wise kernels reach."""
LINK_SHARE = 0.8
"""Share of a link's published speed that NCCL's rings reach on large messages."""
RESERVED_GIB = 1.5
"""CUDA context, NCCL's buffers, cuBLAS workspaces and fragmentation."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    num_nodes: int
    gpus_per_node: int

    @property
    def world_size(self) -> int:
        """Number of GPUs, one rank each."""
        return self.num_nodes * self.gpus_per_node

    @property
    def nvlink_bytes_per_s(self) -> float:
        """Speed between a node's GPUs in one direction, as collectives reach it."""
        return self.gpu.nvlink_gb_per_s / 2 * GIGA * LINK_SHARE

    @property
    def node_bytes_per_s(self) -> float:
        """Speed from a node to others, as collectives reach it."""
        return self.gpu.inter_node_gbit_per_s / 8 * GIGA * LINK_SHARE

    @property
    def memory_bytes_per_s(self) -> float:
        """Speed of a GPU's memory."""
        return self.gpu.memory_gb_per_s * GIGA * MEMORY_BANDWIDTH_SHARE

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU that a plan may fill."""
        return (self.gpu.memory_gib - RESERVED_GIB) * GIB

    def ring_bytes_per_s(self, size: int, stride: int) -> float:
        """Return the speed of a ring over `size` ranks with distance `stride`, all such rings of a node together.

        A ring in one node uses NVLink. Rings over several nodes share the nodes' adapters.
        """
        if size * stride <= self.gpus_per_node:
            return self.nvlink_bytes_per_s
        return min(self.nvlink_bytes_per_s, self.node_bytes_per_s / min(stride, self.gpus_per_node))

    def pair_bytes_per_s(self, size: int) -> float:
        """Return the speed of one of `size` consecutive ranks that all send at the same time."""
        if size <= self.gpus_per_node:
            return self.nvlink_bytes_per_s
        return min(self.nvlink_bytes_per_s, self.node_bytes_per_s / self.gpus_per_node)


def find_gpu(name_or_file: str) -> Gpu:
    """Return a GPU by name (`A100-80`), or the one that a YAML file describes. Raises ConfigError for wrong ones."""
    if name_or_file.endswith((".yaml", ".yml")):
        return _read_gpu(Path(name_or_file))
    by_name = {gpu.name.lower(): gpu for gpu in GPUS}
    found = by_name.get(name_or_file.lower())
    if found is not None:
        return found
    names = [gpu.name for gpu in GPUS]
    begun = [name for name in names if name.lower().startswith(name_or_file.lower())]
    near = " or ".join(begun) or nearest_name(name_or_file, names, cutoff=0.5)
    hint = f"did you mean {near}? " if near else ""
    raise ConfigError(
        f"--gpu {name_or_file}: no such GPU; {hint}Known: {', '.join(names)}, or a YAML file that describes "
        "another (docs/planning.md)"
    )


def _read_gpu(path: Path) -> Gpu:
    if not path.is_file():
        raise ConfigError(f"--gpu {path}: no such file")
    source = read_yaml(read_text(path, ConfigError), str(path))
    if not isinstance(source.data, dict):
        raise ConfigError(f"{path}: expected a section of a GPU's values, not {show_value(source.data)}")
    problems = [Problem(f"line {line}", reason) for _, line, reason in source.problems]
    try:
        gpu = Gpu(**{"name": path.stem, "matrix_efficiency": DEFAULT_EFFICIENCY, **source.data})
    except ValidationError as error:
        known = [field.name for field in fields(Gpu)]
        problems += [Problem(str(one["loc"][0]), explain_error(one, known)) for one in error.errors()]
    raise_problems(f"{path}: not a GPU's description", problems)
    return gpu

"""GPUs and clusters: published memory and speeds, and the share of them that training reaches.

In: a name, or a YAML file of the user's own. Out: Gpu, Cluster. Not here: what a step needs of them (timing.py).

Published figures: NVIDIA's data sheets of V100 SXM2 32 GB (2018), A100 SXM4 40 GB (2020) and 80 GB (2021), H100 SXM5
(2022) and H200 SXM (2023): dense tensor-core peaks without sparsity, memory size and bandwidth, NVLink both ways
together; links between nodes as in NVIDIA's own servers (DGX-1 and DGX-2: 4 and 8 x 100 Gb/s, counted as 400; DGX A100:
8 x 200; DGX H100 and H200: 8 x 400).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.problems import did_you_mean, nearest_name, show_value
from ctxlm_ds.recipe.yaml_source import read_yaml

GIGA = 1_000_000_000
TERA = 1_000_000_000_000
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU; a user's own is a YAML section with these names."""

    name: str
    memory_gib: float
    """What a process can allocate of the memory sold as so many GB."""
    tflops_16bit: float
    """Dense peak of matrix products in fp16 (and bf16 where `has_bf16`), 1e12 operations a second."""
    tflops_fp32: float
    """Dense peak of fp32 products as torch runs them by default (no TF32)."""
    memory_gb_per_s: float
    nvlink_gb_per_s: float
    """Between GPUs of one node, both directions together (as published)."""
    inter_node_gbit_per_s: float
    """Of a whole node, one direction, all its adapters together."""
    matrix_efficiency: float
    """Share of the peak that large matrix products reach inside training."""
    has_bf16: bool = True


# matrix_efficiency: one constant a generation, see docs/planning.md ("Constants").
GPUS: tuple[Gpu, ...] = (
    Gpu("V100-32", 31.7, 125.0, 15.7, 900.0, 300.0, 400.0, 0.60, has_bf16=False),
    Gpu("A100-40", 39.4, 312.0, 19.5, 1555.0, 600.0, 1600.0, 0.80),
    Gpu("A100-80", 79.1, 312.0, 19.5, 2039.0, 600.0, 1600.0, 0.80),
    Gpu("H100", 79.1, 989.0, 67.0, 3350.0, 900.0, 3200.0, 0.60),
    Gpu("H200", 139.8, 989.0, 67.0, 4800.0, 900.0, 3200.0, 0.60),
)

DEFAULT_EFFICIENCY = 0.55
MEMORY_BANDWIDTH_SHARE = 0.8
"""Of the published memory bandwidth that long element-wise kernels reach."""
LINK_SHARE = 0.8
"""Of a link's published speed that NCCL's rings reach on large messages."""
RESERVED_GIB = 1.5
"""CUDA context, NCCL's buffers, cuBLAS workspaces and fragmentation: not to be planned with."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    num_nodes: int
    gpus_per_node: int

    @property
    def world_size(self) -> int:
        """GPUs of all nodes, one rank each."""
        return self.num_nodes * self.gpus_per_node

    @property
    def nvlink_bytes_per_s(self) -> float:
        """One direction, as collectives reach it."""
        return self.gpu.nvlink_gb_per_s / 2 * GIGA * LINK_SHARE

    @property
    def node_bytes_per_s(self) -> float:
        """What a node sends to others at once, as collectives reach it."""
        return self.gpu.inter_node_gbit_per_s / 8 * GIGA * LINK_SHARE

    @property
    def memory_bytes_per_s(self) -> float:
        """Reading or writing a GPU's memory."""
        return self.gpu.memory_gb_per_s * GIGA * MEMORY_BANDWIDTH_SHARE

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU that a plan may fill."""
        return (self.gpu.memory_gib - RESERVED_GIB) * GIB

    def ring_bytes_per_s(self, size: int, stride: int) -> float:
        """Speed of a ring over `size` ranks that lie `stride` apart, all such rings of a node working at once.

        A ring within a node has NVLink; one over several shares its nodes' adapters with the rings beside it.
        """
        if size * stride <= self.gpus_per_node:
            return self.nvlink_bytes_per_s
        return min(self.nvlink_bytes_per_s, self.node_bytes_per_s / min(stride, self.gpus_per_node))


def find_gpu(name_or_file: str) -> Gpu:
    """A GPU by name (`A100-80`), or the one that a YAML file describes.

    Raises:
        ConfigError: unknown, with the nearest name; a file with missing, unknown or impossible values.
    """
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
        f"--gpu {name_or_file}: no such GPU; {hint}Known: {', '.join(names)}, or a YAML file of your own "
        "(docs/planning.md)"
    )


def _read_gpu(path: Path) -> Gpu:
    if not path.is_file():
        raise ConfigError(f"--gpu {path}: no such file")
    source = read_yaml(path.read_text(encoding="utf-8"), str(path))
    values = source.data
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a section of a GPU's figures, not {show_value(values)}")
    values = {"name": path.stem, "matrix_efficiency": DEFAULT_EFFICIENCY, **values}
    known = {item.name: item for item in fields(Gpu)}
    problems = [f"{where}: {reason}" for _, where, reason in source.problems]
    problems += [f"{name}: unknown{did_you_mean(name, known)}" for name in values if name not in known]
    problems += [f"{name}: missing" for name in known if name not in values and name != "has_bf16"]
    problems += [text for name in known if name in values for text in _wrong_value(name, values[name])]
    if problems:
        raise ConfigError("\n".join([f"{path}: not a GPU's description", *(f"  {text}" for text in problems)]))
    return Gpu(**values)


def _wrong_value(name: str, value: Any) -> list[str]:
    if name == "name":
        return [] if isinstance(value, str) else [f"name: {show_value(value)}: expected text"]
    if name == "has_bf16":
        return [] if isinstance(value, bool) else [f"has_bf16: {show_value(value)}: expected true or false"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        return [f"{name}: {show_value(value)}: expected a number above 0"]
    if name == "matrix_efficiency" and value > 1:
        return [f"matrix_efficiency: {value}: expected at most 1"]
    return []

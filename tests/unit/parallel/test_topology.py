"""Topology with one process, with and without a process group."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.parallel.topology import Topology, build_topology


def test_one_process_needs_no_process_group() -> None:
    topology = build_topology(local_rank=0, local_world_size=1)
    assert (topology.rank, topology.world_size, topology.data_parallel_size, topology.cpu_group) == (0, 1, 1, None)
    assert topology.is_main
    assert topology.all_gather_object({"a": 1}) == [{"a": 1}]
    assert topology.broadcast_object("x") == "x"


def test_sum_is_float64_and_leaves_its_input() -> None:
    values = torch.tensor([1.0, 2.0**-30], dtype=torch.float32)
    total = Topology().all_reduce_sum(values)
    assert total.dtype == torch.float64
    total += 1
    assert values.tolist() == [1.0, 2.0**-30]


@pytest.mark.parametrize("key", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_world_that_does_not_split_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"1 ranks do not split into groups of .*{key} 2"):
        build_topology(**{key: 2})


def test_importing_topology_is_light() -> None:
    code = "import sys, ctxlm_ds.parallel.topology; print([m for m in ('torch', 'deepspeed') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

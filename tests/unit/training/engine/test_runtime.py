"""An allocator's error becomes one message with the size of the model; a start does not load a compiler."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from deepspeed import comm

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import ParallelConfig, TrainingConfig
from ctxlm_ds.training.engine import runtime
from ctxlm_ds.training.engine.runtime import compile_setting, explain_out_of_memory

WITHOUT_COMPILER = """
import sys
from ctxlm_ds.training.engine.runtime import import_muon_uncompiled
import_muon_uncompiled()
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam  # what its ZeRO optimizers ask for
import torch
import ctxlm_ds.parallel.megatron
assert compiler.compile() is torch.compile
# torch.utils.flop_counter imports triton where it is installed: a quarter of a second.
print("loaded:", [name for name in ("torch._inductor.compile_fx",) if name in sys.modules])
"""


def test_memory_that_cannot_be_had_is_explained() -> None:
    config = load_config("bert-base", ["model.vocab_size=30522"])
    message = r"memory ran out\. The model has 110,106,428 parameters; .* about 2 GB"
    with pytest.raises(ConfigError, match=message), explain_out_of_memory(config):
        torch.empty(2**55)
    with pytest.raises(ConfigError, match=message), explain_out_of_memory(config):
        raise MemoryError


@pytest.mark.parametrize(("stage", "device"), [(1, "cpu"), (1, "cuda"), (3, "cuda")])
def test_layers_are_compiled_only_if_the_recipe_says_so(stage: int, device: str) -> None:
    assert compile_setting(TrainingConfig(), ParallelConfig(), stage, device) is False
    assert compile_setting(TrainingConfig(compile=True), ParallelConfig(), stage, device) is True


GRAPHS = {"compile": True, "compile_mode": "reduce-overhead"}


@pytest.mark.parametrize(
    ("training", "parallel", "stage", "device", "reason"),
    [
        ({}, {}, 1, "cuda", None),
        ({"compile": False}, {}, 1, "cpu", None),
        ({}, {}, 1, "cpu", "needs a GPU, and this run is on cpu"),
        ({}, {}, 3, "cpu", "not bf16 and stage 3"),
        ({}, {}, 3, "cuda", "not bf16 and stage 3"),
        ({}, {}, 2, "cuda", "needs bf16 and ZeRO stage 1, not bf16 and stage 2"),
        ({"precision": "fp32"}, {}, 1, "cuda", "not fp32 and stage 1"),
        ({}, {"tensor_parallel_size": 2}, 1, "cuda", "without tensor, context and pipeline"),
        ({"activation_checkpointing": True}, {}, 1, "cuda", "does not go with activation_checkpointing"),
    ],
)
def test_layers_that_cannot_be_cuda_graphs_are_refused(
    training: dict[str, Any], parallel: dict[str, Any], stage: int, device: str, reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(runtime, "why_compiled_cannot_run", lambda device: None)
    arguments = TrainingConfig(**GRAPHS | training), ParallelConfig(**parallel), stage, device
    if reason is None:
        expected = False if training.get("compile") is False else "reduce-overhead"
        assert compile_setting(*arguments) == expected
        return
    with pytest.raises(ConfigError, match=f"training.compile_mode: `reduce-overhead` cannot run here: .*{reason}"):
        compile_setting(*arguments)


def test_cuda_graphs_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "why_compiled_cannot_run", lambda device: "torch.compile needs triton on cuda")
    with pytest.raises(ConfigError, match=r"`reduce-overhead` cannot run here: torch\.compile needs triton on cuda\."):
        compile_setting(TrainingConfig(**GRAPHS), ParallelConfig(), 1, "cuda")


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory(load_config("bert-tiny")):
        raise RuntimeError("something else")


@pytest.mark.long
def test_a_start_loads_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "loaded: []", done.stderr


def test_a_sum_over_one_rank_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[object, bool]] = []
    sizes = {"one": 1, "two": 2}
    monkeypatch.setattr(comm, "all_reduce", lambda tensor, group, async_op: sent.append((group, async_op)))
    monkeypatch.setattr(comm, "get_world_size", lambda group=None: sizes[group])
    runtime.skip_sums_over_one_rank()
    runtime.skip_sums_over_one_rank()
    for group in sizes:
        comm.all_reduce(torch.ones(1), group=group)
        comm.all_reduce(torch.ones(1), group=group, async_op=True)
    assert sent == [("one", True), ("two", False), ("two", True)]


def test_operators_are_built_without_debug_information(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of a compiler's options counts, and DeepSpeed gives -g."""
    from deepspeed.ops.op_builder import FusedAdamBuilder

    given: list[list[str]] = []
    monkeypatch.setattr(FusedAdamBuilder, "load", lambda self, verbose: given.append(self.cxx_args()))
    runtime.deepspeed_adam(False)
    assert "-g" in given[0] and given[0][-1] == "-g0"

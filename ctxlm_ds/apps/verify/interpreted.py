"""Run the Triton kernels of a recipe in Triton's interpreter, inside its layers, and compare with torch's rows.

The layers have the run's widths, heads and types, and one row of at most 32 positions (parts.py). In a process of its
own, because Triton reads the environment when it is imported:

    TRITON_INTERPRET=1 python -m ctxlm_ds.apps.verify.interpreted < a JSON with recipe and operations
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ctxlm_ds.apps.verify.parts import smaller
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.kernels import dispatch
from ctxlm_ds.kernels.dispatch import DTYPES, OPERATIONS, KernelSet
from ctxlm_ds.kernels.triton.launch import round_as_devices
from ctxlm_ds.models.program import Program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.process.patches import replaced
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig
from ctxlm_ds.training.engine.losses import TermLosses
from ctxlm_ds.training.measure import describe

ROW = "triton"
PLAIN = {
    "attention": "reference", "layer_norm": "torch", "bias_gelu": "torch", "rotary": "torch", "linear": "auto",
    "dropout": "torch", "add_norm": "torch", "sampling": "torch", "cross_entropy": "chunked",
}  # fmt: skip
"""Operation -> the row that computes it in every type as its definition says."""
MORE = 1.5
"""Kernels may have so many times the error of torch's rows in the same type, or round the exact numbers once."""


def results(
    program: Program, dtype: torch.dtype, weights: Mapping[str, torch.Tensor], batch: Batch
) -> list[torch.Tensor]:
    """Return the loss and the gradients of the trained parameters."""
    parallel = program.parallel
    module = program.module().to(dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    parallel.dropout.begin(0, 0, torch.device("cpu"))
    fields = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.fields.items()}
    losses = TermLosses(program.terms, program.outputs, parallel)
    loss, _ = losses(module.run(fields), fields, torch.ones(len(program.terms)))
    loss.backward()
    trained = (x for name, x in module.named_parameters() if program.facts[name].trained)
    return [loss.detach(), *(x.grad for x in trained if x.grad is not None)]


def difference(found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> float:
    """Return the root mean square, over the tensors, of each one's root mean square error over its own size."""
    pairs = [(own.double(), of.double()) for own, of in zip(found, exact, strict=True)]
    squares = [((own - of).square().mean() / of.square().mean()).item() for own, of in pairs if of.any()]
    return float(np.sqrt(np.mean(squares)))


def compare(config: RunConfig, operations: Iterable[str]) -> dict[str, Any]:
    """Return the errors against float64 of Triton's rows of `operations` and of torch's, and if they are right."""
    config, dtype = smaller(config.model_copy(update={"parallel": ParallelConfig()})), DTYPES[config.training.precision]
    program = describe(config)
    weights = {name: program.initial_value(name, config.training.seed).to(dtype) for name in program.shapes}
    fields = build_objective(config.objective).fields(config.data)
    batch = Batch.example(fields, 1, np.random.default_rng(0), config.model.vocab_size or 1)

    def run(names: Mapping[str, str], dtype: torch.dtype) -> list[torch.Tensor]:
        parallel = ParallelContext(dropout=DropoutStreams(config.training.seed, enabled=config.model.drops))
        chosen = describe(config, parallel, kernels_of=lambda precision: KernelSet(names, "cpu", dtype))
        return results(chosen, dtype, weights, batch)

    exact, plain = run(PLAIN, torch.float64), run(PLAIN, dtype)
    rows = {
        name: tuple(replace(row, why_not=lambda need: None) if row.name == ROW else row for row in table)
        for name, table in OPERATIONS.items()
    }
    with replaced(dispatch, "OPERATIONS", rows):
        found = run(PLAIN | dict.fromkeys(operations, ROW), dtype)
    of_triton, of_torch = difference(found, exact), difference(plain, exact)
    is_right = of_triton <= max(MORE * of_torch, torch.finfo(dtype).eps / 2)
    return {"triton": of_triton, "torch": of_torch, "right": is_right}


def main() -> None:
    given = json.load(sys.stdin)
    torch.set_num_threads(1)
    round_as_devices()
    print(json.dumps(compare(RunConfig.model_validate(given["recipe"]), given["operations"])))


if __name__ == "__main__":
    main()

"""The parts of a run that can be tried without its GPUs: inputs, memory, model, collectives and kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ctxlm_ds.apps.plan.inputs import input_lines
from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.verify.findings import CHECKED, NOT_CHECKED, PROVED, WRONG, Finding
from ctxlm_ds.errors import ConfigError, KernelError, VerifyError
from ctxlm_ds.recipe.hardware import GIB
from ctxlm_ds.recipe.schema import RunConfig

if TYPE_CHECKING:
    from ctxlm_ds.apps.plan.plan import Planner
    from ctxlm_ds.apps.verify.fake_cuda import FakePass
    from ctxlm_ds.kernels.triton.launch import Launch


def inputs(config: RunConfig) -> Finding:
    """Open tokenizer and datasets as the run will."""
    try:
        lines = [line.strip() for line in input_lines(config)]
    except ConfigError as error:
        return Finding("inputs", WRONG, str(error))
    return Finding("inputs", NOT_CHECKED if "not checked" in lines[-1] else CHECKED, "\n".join(lines))


def memory(planner: Planner, layout: Layout) -> Finding:
    """Compare the planned memory of the fullest GPU with what it has."""
    needed, usable = planner.memory(layout).total, planner.cluster.usable_bytes
    text = f"{needed / GIB:.1f} GiB on the fullest GPU, of {usable / GIB:.1f} that a plan may fill"
    return Finding("memory", CHECKED if needed <= usable else WRONG, text)


def model(config: RunConfig, planner: Planner, layout: Layout, capability: tuple[int, int]) -> Iterator[Finding]:
    """Run the model of the first and the last tensor-parallel rank forward and backward, and compile its kernels."""
    from ctxlm_ds.apps.verify.fake_cuda import FakeModel, fake_cuda, rank_that_sends_nothing

    launches: list[Launch] = []
    for rank in sorted({0, layout.tensor - 1}):
        name = "model" if layout.tensor == 1 else f"model, tensor-parallel rank {rank}"
        with ExitStack() as stack:
            kept = _recorded(stack)
            try:
                with rank_that_sends_nothing(config, rank) as parallel, fake_cuda(capability):
                    done = FakeModel(config, parallel).run()
            except (KernelError, VerifyError) as error:
                yield Finding(name, WRONG, str(error))
                return
        launches += kept
        yield _passed(name, done)
        if layout.tensor > 1:
            sent = {operation: parallel.traffic.num_bytes[operation] for operation in parallel.traffic.calls}
            yield collectives(planned_bytes(planner, layout), sent, rank)
    yield kernels(launches, 10 * capability[0] + capability[1])


def _recorded(stack: ExitStack) -> list[Launch]:
    """Return the list that gets the launches of Triton kernels, which stays empty without Triton."""
    if importlib.util.find_spec("triton") is None:
        return []
    from ctxlm_ds.kernels.triton.launch import recorded

    return stack.enter_context(recorded())


def _passed(name: str, done: FakePass) -> Finding:
    """Judge a pass: each trained parameter must have a gradient."""
    missing = [parameter for parameter in done.parameters if parameter not in done.gradients]
    if missing:
        return Finding(name, WRONG, f"no gradient: {', '.join(missing[:3])} and {len(missing)} in all")
    kernels = ", ".join(f"{operation} {row}" for operation, row in done.kernels.items())
    counts = f"{sum(done.forward.values()):,} operators forward, {sum(done.backward.values()):,} backward"
    text = f"forward and backward on fake CUDA tensors, {len(done.gradients)} gradients; {counts}\nkernels: {kernels}"
    return Finding(name, PROVED, text)


def planned_bytes(planner: Planner, layout: Layout) -> dict[str, float]:
    """Return the planner's bytes of tensor-parallel collectives of one micro-batch, over all pipeline stages."""
    times = layout.num_micro_batches(planner.config.training.global_batch_size)
    planned: dict[str, float] = {}
    for stage in planner.stages(layout):
        for message in planner.load(layout, stage.index).messages:
            if message.axis == "tensor":
                planned[message.operation] = planned.get(message.operation, 0) + message.num_bytes / times
    return planned


def collectives(planned: dict[str, float], sent: dict[str, int], rank: int) -> Finding:
    """Compare the bytes that a rank's layers sent in a micro-batch with the plan's."""
    name = f"collectives, tensor-parallel rank {rank}"
    parts = [f"{operation} {sent.get(operation, 0) / 1e6:,.1f} MB" for operation in sorted({*planned, *sent})]
    differing = [key for key in {*planned, *sent} if round(planned.get(key, 0)) != sent.get(key, 0)]
    if not differing:
        return Finding(name, PROVED, f"a micro-batch sends what the planner counts: {', '.join(parts)}")
    told = ", ".join(f"{key} {planned.get(key, 0) / 1e6:,.1f} MB" for key in sorted(differing))
    return Finding(name, WRONG, f"a micro-batch sends {', '.join(parts)}; the planner counts {told}")


def kernels(launches: Sequence[Launch], capability: int) -> Finding:
    """Compile each Triton kernel of a run for its GPU."""
    if not launches:
        return Finding("triton kernels", CHECKED, "none is chosen (`auto` takes those that were measured faster)")
    from ctxlm_ds.kernels.triton.machine_code import compiled, signature_of

    lines, spills = [], False
    distinct: dict[Any, Launch] = {signature_of(launch): launch for launch in launches}
    for launch in distinct.values():
        code = compiled(launch, capability)
        spills |= code.spills > 0
        lines.append(f"{code.name}: {code.registers} registers, {code.spills} spills, {code.shared_bytes} B shared")
    return Finding("triton kernels", PROVED, "\n".join([f"compiled for sm_{capability}", *lines]))

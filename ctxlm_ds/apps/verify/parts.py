"""The parts of a run that can be tried without its GPUs: inputs, memory, model, collectives and kernels.

Each gives one line of a table, which says how sure it is. Separate processes run a smaller recipe.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.console import aligned
from ctxlm_ds.errors import ConfigError, KernelError, VerifyError
from ctxlm_ds.recipe.hardware import GIB
from ctxlm_ds.recipe.schema import KernelsConfig, RunConfig
from ctxlm_ds.recipe.sections import ModelSection

if TYPE_CHECKING:
    from ctxlm_ds.apps.plan.plan import Planner
    from ctxlm_ds.apps.verify.fake_cuda import FakePass
    from ctxlm_ds.kernels.triton.launch import Launch

PROVED = "proved"
"""The thing itself ran or was compiled here."""
CHECKED = "checked"
"""A calculation, or sizes and fingerprints."""
NOT_CHECKED = "not checked"
ONLY_A_DEVICE = "only a device"
WRONG = "WRONG"
LEAST_TEXT = 40
"""Characters of a line of a text, however narrow the terminal."""
STATES = (PROVED, CHECKED, NOT_CHECKED, ONLY_A_DEVICE, WRONG)
MOST_WORDS, MOST_POSITIONS = 10_000, 32
FEWEST_BLOCKS = 2
SLOTS = "max_predictions", "num_predictions"
"""Settings of objectives that are at most the positions of a row."""
PROCESS_S = 110.0
"""The longest that a process may take."""


@dataclass(frozen=True)
class Finding:
    """What was found of one part of a run."""

    part: str
    state: str
    """One of STATES."""
    text: str


def table(findings: Sequence[Finding], columns: int = 100) -> list[str]:
    """Return the findings as lines of a table, their texts wrapped to the columns of a terminal."""
    names = max(len(finding.part) for finding in findings) + max(map(len, STATES))
    width = max(LEAST_TEXT, columns - names - len("      "))
    lines = []
    for finding in findings:
        wrapped = [part for line in finding.text.splitlines() for part in wrap(line, width, subsequent_indent="  ")]
        lines += [(finding.part, finding.state, wrapped[0]), *(("", "", part) for part in wrapped[1:])]
    return aligned(lines, (0, 1, 2))


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"wrong": any(finding.state == WRONG for finding in findings), "findings": list(map(asdict, findings))}


def smaller(config: RunConfig) -> RunConfig:
    """Return the recipe with at least one block on each pipeline stage and one row in a micro-batch.

    Its widths, heads, types and layout are those of the run, its kernels those of a CPU; it writes no continuations.
    """
    blocks = max(FEWEST_BLOCKS, config.parallel.pipeline_parallel_size)
    words = MOST_WORDS if config.model.vocab_size is None else min(MOST_WORDS, config.model.vocab_size)
    config = config.model_copy(update={"model": _with_fewer_layers(config.model, blocks, words)})
    if config.teacher.model is not None:
        config = config.with_values("teacher", model=_with_fewer_layers(config.teacher.model, blocks, words))
    slots = {name: min(MOST_POSITIONS, value) for name, value in config.objective if name in SLOTS and value}
    config = config.with_values("objective", **slots)
    each = -(-MOST_POSITIONS // config.parallel.context_parallel_size)
    length = min(each * config.parallel.context_parallel_size, config.data.seq_length)
    config = config.with_values("data", seq_length=length)
    config = config.with_values("parallel", pipeline_layers=None)
    config = config.with_values("evaluation", continuations=0, prompts=[])
    config = config.model_copy(update={"kernels": KernelsConfig()})
    return config.with_values("training", micro_batch_size=1, batch_ramp=None, compile=False)


def _with_fewer_layers(model: ModelSection, blocks: int, words: int) -> ModelSection:
    depths = {name: min(blocks, value) for name, value in model if "num_" in name and name.endswith("_layers")}
    return model.model_copy(update={**depths, "vocab_size": words})


def run_apart(module: str, given: dict[str, Any], **environment: str) -> Any:
    """Return the JSON that a module of this folder prints last, in a separate process; VerifyError if it fails."""
    command = [sys.executable, "-m", f"{__package__}.{module}"]
    try:
        done = subprocess.run(
            command, input=json.dumps(given), env={**os.environ, **environment}, capture_output=True, text=True,
            timeout=PROCESS_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise VerifyError(f"it took longer than {PROCESS_S:.0f} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise VerifyError(said.removeprefix("[rank0]: "))
    return json.loads(done.stdout.splitlines()[-1])


def inputs(open_inputs: Callable[[], list[str]]) -> Finding:
    """Open tokenizer and datasets as the run will; `open_inputs` returns a line for each."""
    try:
        lines = [line.strip() for line in open_inputs()]
    except ConfigError as error:
        return Finding("inputs", WRONG, str(error))
    return Finding("inputs", NOT_CHECKED if "not checked" in lines[-1] else CHECKED, "\n".join(lines))


def memory(planner: Planner, layout: Layout) -> Finding:
    """Compare the planned memory of the fullest GPU with what it has."""
    needed, usable = planner.memory(layout).total, planner.cluster.usable_bytes
    text = f"{needed / GIB:.1f} GiB on the fullest GPU, of {usable / GIB:.1f} that a plan may fill"
    return Finding("memory", CHECKED if needed <= usable else WRONG, text)


def model(planner: Planner, layout: Layout, capability: tuple[int, int], apart: Executor) -> Iterator[Finding]:
    """Run the model of the first and the last of the ranks that share it, and try its kernels."""
    from ctxlm_ds.apps.verify.fake_cuda import FakeModel, fake_cuda, rank_that_sends_nothing

    config = planner.config
    launches: list[Launch] = []
    ranks = layout.tensor * layout.context
    for rank in sorted({0, ranks - 1}):
        which = f"tensor-parallel rank {rank}" if layout.context == 1 else f"rank {rank} of a row"
        name = "model" if ranks == 1 else f"model, {which}"
        kept: list[Launch] = []
        with ExitStack() as stack:
            if importlib.util.find_spec("triton") is not None:
                from ctxlm_ds.kernels.triton.launch import recorded

                kept = stack.enter_context(recorded())
            try:
                one = rank_that_sends_nothing(config.parallel, config.training, config.model.drops, rank)
                with one as parallel, fake_cuda(capability):
                    done = FakeModel(config, parallel).run()
            except (KernelError, VerifyError) as error:
                yield Finding(name, WRONG, str(error))
                return
        launches += kept
        yield _passed(name, done, layout.pipeline)
        if ranks > 1:
            sent = {operation: parallel.traffic.num_bytes[operation] for operation in parallel.traffic.calls}
            yield collectives(planned_bytes(planner, layout), sent, which)
    if not launches:
        yield Finding("triton kernels", CHECKED, "none is chosen (`auto` takes those that were measured faster)")
        return
    operations = [operation for operation, rows in done.kernels.items() if "triton" in rows.split(" and ")]
    given = {"recipe": config.model_dump(mode="json"), "operations": operations}
    compared = apart.submit(run_apart, "interpreted", given, TRITON_INTERPRET="1")
    yield kernels(launches, 10 * capability[0] + capability[1])
    yield interpreted(operations, compared)


def interpreted(operations: Sequence[str], compared: Future[Any]) -> Finding:
    """Judge the errors of Triton's kernels in its interpreter."""
    name = "triton kernels' numbers"
    try:
        found = compared.result()
    except VerifyError as error:
        return Finding(name, NOT_CHECKED, str(error))
    text = (
        f"{', '.join(operations)} in the interpreter, in layers of the run's widths: errors of loss and gradients "
        f"{found['triton']:.1e}, with torch's rows {found['torch']:.1e}"
    )
    return Finding(name, PROVED if found["right"] else WRONG, text)


def ranks(counted: Future[Any], num_ranks: int) -> Finding:
    """Compare what a rank of each pipeline stage sends in a step, of a smaller model, with the planner's count."""
    name = f"a step of {num_ranks:,} ranks"
    try:
        stages = counted.result()
    except VerifyError as error:
        return Finding(name, NOT_CHECKED, str(error))
    wrong = [stage for stage in stages if stage["sent"] != stage["planned"]]
    if wrong:
        lines = (f"stage {one['stage']} sends {one['sent']}; the planner counts {one['planned']}" for one in wrong)
        return Finding(name, WRONG, "\n".join(lines))
    kinds = sorted({kind for stage in stages for sent in stage["sent"] for kind in sent})
    where = f"a rank of each of {len(stages)} stages sends" if len(stages) > 1 else "a rank sends"
    text = f"DeepSpeed's engine with fewer layers, words and rows: {where} what the planner counts ({', '.join(kinds)})"
    return Finding(name, PROVED, text if kinds else "a rank sends nothing, as planned")


def _passed(name: str, done: FakePass, stages: int = 1) -> Finding:
    """Judge a pass: each trained parameter must have a gradient."""
    missing = [parameter for parameter in done.parameters if parameter not in done.gradients]
    if missing:
        return Finding(name, WRONG, f"no gradient: {', '.join(missing[:3])} and {len(missing)} in all")
    kernels = ", ".join(f"{operation} {row}" for operation, row in done.kernels.items())
    counts = f"{sum(done.forward.values()):,} operators forward, {sum(done.backward.values()):,} backward"
    where = f"through {stages} pipeline stages" if stages > 1 else "on fake CUDA tensors"
    text = f"forward and backward {where}, {len(done.gradients)} gradients; {counts}\nkernels: {kernels}"
    return Finding(name, PROVED, text)


def planned_bytes(planner: Planner, layout: Layout) -> dict[str, float]:
    """Return the planner's bytes of layers' collectives of one micro-batch, over all pipeline stages."""
    times = layout.num_micro_batches(planner.config.training.global_batch_size)
    planned: dict[str, float] = {}
    for stage in planner.stages(layout):
        for message in planner.load(layout, stage.index).messages:
            if message.counted:
                planned[message.counted] = planned.get(message.counted, 0) + message.num_bytes / times
    return planned


def collectives(planned: dict[str, float], sent: dict[str, int], rank: str) -> Finding:
    """Compare the bytes that a rank's layers sent in a micro-batch with the plan's."""
    name = f"collectives, {rank}"
    parts = [f"{operation} {sent.get(operation, 0) / 1e6:,.1f} MB" for operation in sorted({*planned, *sent})]
    differing = [key for key in {*planned, *sent} if round(planned.get(key, 0)) != sent.get(key, 0)]
    if not differing:
        return Finding(name, PROVED, f"a micro-batch sends what the planner counts: {', '.join(parts)}")
    told = ", ".join(f"{key} {planned.get(key, 0) / 1e6:,.1f} MB" for key in sorted(differing))
    return Finding(name, WRONG, f"a micro-batch sends {', '.join(parts)}; the planner counts {told}")


def kernels(launches: Sequence[Launch], capability: int) -> Finding:
    """Compile each Triton kernel of a run for its GPU."""
    from ctxlm_ds.kernels.triton.machine_code import compiled, signature_of

    lines = []
    distinct: dict[Any, Launch] = {signature_of(launch): launch for launch in launches}
    for launch in distinct.values():
        code = compiled(launch, capability)
        lines.append(f"{code.name}: {code.registers} registers, {code.spills} spills, {code.shared_bytes} B shared")
    return Finding("triton kernels", PROVED, "\n".join([f"compiled for sm_{capability}", *lines]))

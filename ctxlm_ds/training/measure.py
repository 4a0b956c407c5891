"""Measure a recipe's model layer by layer on the `meta` device.

One layer of each kind runs, forward and backward, with two numbers of rows. Its work with any other number is on the
line between them. meter.py counts, plan.py adds pipeline stages and data parallelism.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ctxlm_ds.data.fields import Field
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
from ctxlm_ds.models.layers import Flow, LayerDescription, ModelBuild, carried_states, dropout_numbers, run_layer
from ctxlm_ds.models.meter import CUDA, Meter, OnDevice, Platform, Product, Trace, Work
from ctxlm_ds.models.program import Program, build_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.cross_entropy import chunk_rows
from ctxlm_ds.parallel.mappings import own_share
from ctxlm_ds.parallel.topology import context_group
from ctxlm_ds.recipe.schema import KernelsConfig, RunConfig
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.registry import FAMILIES, load_object

BACKWARD_FACTOR = 2
"""The backward pass multiplies twice for each product of the forward pass."""
MEASURED_ROWS = 64
"""The smaller number of rows per rank of those that share layers and rows: activations outweigh weights."""


def with_vocabulary(model: ModelSection) -> ModelSection:
    """Return the model with the published vocabulary of its family if the recipe leaves the size to the tokenizer.

    Raises ConfigError if the family was published without one.
    """
    if model.vocab_size is not None:
        return model
    size = FAMILIES.get(model.family).vocab_size
    if size is None:
        raise ConfigError(f"model.vocab_size is not set, and family {model.family} has no published one; set it")
    return model.model_copy(update={"vocab_size": size})


class LayerWork:
    """The work of one layer, or of the loss, on one rank with any number of rows."""

    def __init__(self, fewer: Trace, more: Trace, rows: int, further: int) -> None:
        """`fewer` was measured with `rows` rows, `more` with `further` rows in addition."""
        self.fields = fewer.fields
        self._fewer, self._more, self._rows, self._further = fewer, more, rows, further
        self.at, self.products = cache(self._at), cache(self._products)

    def _at(self, rows: int) -> Work:
        together = min(rows, self._fewer.together(rows))
        return self._on_line(rows)._replace(workspace=self._on_line(together).workspace)

    def _on_line(self, rows: float) -> Work:
        ends = zip(self._fewer.work, self._more.work, strict=True)
        return Work(*(int(a + (b - a) * (rows - self._rows) // self._further) for a, b in ends))

    def _products(self, rows: int) -> list[Product]:
        return [
            product._replace(
                flops=product.flops * rows // self._rows,
                tokens=max(1, product.tokens * rows // self._rows),
                computed=product.computed * rows // self._rows,
            )
            for product in self._fewer.products
        ]


@dataclass(frozen=True, eq=False)
class MeasuredModel:
    """Every layer of a model, on one rank of those that share layers and rows."""

    layers: list[LayerWork]
    """In the order of the descriptions."""
    frozen: list[bool]
    """True for each layer of a teacher."""
    recomputed: list[LayerWork]
    """Work with recomputation of the repeated layers."""
    loss: LayerWork
    flow: Flow
    tensor_bytes: list[Mapping[str, float]]
    """Bytes per row of each named tensor before each layer, and after the last."""
    field_bytes: Mapping[str, int]
    """Bytes per row of each field of the batch."""


def training_flops_per_row(measured: MeasuredModel) -> int:
    """Return the operations of one row, forward and backward (a teacher's forward), without recomputation."""
    works = ((layer.at(1), frozen) for layer, frozen in zip(measured.layers, measured.frozen, strict=True))
    # Products with inputs without a gradient have one product backward.
    return sum(
        work.flops if frozen else (1 + BACKWARD_FACTOR) * work.flops - work.constant_flops for work, frozen in works
    )


def useful_flops_per_row(config: RunConfig) -> float:
    """Return training_flops_per_row without what no output depends on: a causal model's positions see no later ones.

    The count of other products is proportional to the length s, so the pairs' share is twice the count at s minus four
    times the one at s / 2.
    """
    total, length = training_flops_per_row(measure(config)), config.data.seq_length
    if not build_objective(config.objective).shifted or length % 2:
        return total
    half = config.model_copy(update={"data": config.data.model_copy(update={"seq_length": length // 2})})
    pairs = 2 * (total - 2 * training_flops_per_row(measure(half)))
    return total - pairs * (length - 1) / (2 * length)


_measured: dict[tuple[Any, ...], MeasuredModel] = {}
_described: dict[tuple[Any, ...], Program] = {}


MEASURED: Any = {
    "model": True, "data": True, "objective": True, "teacher": True, "kernels": True,
    "training": {"precision"}, "parallel": {"vocab_multiple"}, "evaluation": {"continuations", "prompts"},
}  # fmt: skip
"""Settings on which a measurement, or the program of a complete model, depends."""


def measure(
    config: RunConfig, tensor: int = 1, sequence_parallel: bool = False, platform: Platform = CUDA,
    context: int = 1, rows: int = 0,
) -> MeasuredModel:  # fmt: skip
    """Measure a recipe's model on the first of `tensor` x `context` ranks; results are cached.

    `rows` are those of a micro-batch, whose prediction slots are padded to a multiple of `context`.
    """
    if config.training.precision == "fp16":
        # The same bytes and operations.
        config = config.with_values("training", precision="bf16")
    fields = build_objective(config.objective).fields(config.data)
    pads = any(rows * field.columns % context for field in fields if field.shared == "slots")
    remainder = rows % context if pads else 0
    key = (config.model_dump_json(include=MEASURED), platform, tensor, sequence_parallel, context, remainder)
    if key not in _measured:
        reads_masks = _reads_masks(config.kernels.attention, config.training.precision, config.model, platform)
        platform = replace(platform, reads_masks=reads_masks)
        with ranks_that_send_nothing(tensor, context) as (group, row_group):
            parallel = ParallelContext(
                size=tensor,
                group=group,
                sequence_parallel=sequence_parallel,
                vocab_multiple=config.parallel.vocab_multiple,
                dropout=DropoutStreams(enabled=True),
                context_size=context,
                context_group=row_group,
            )
            program = describe(config, parallel, platform)
            _measured[key] = _measure(program, fields, DTYPES[config.training.precision], platform, remainder)
    return _measured[key]


def _reads_masks(kernel: str, precision: str, model: ModelSection, platform: Platform) -> bool:
    """Return whether attention takes masks: a GPU has FlashAttention by bounds in 16 bits, but not by ranks."""
    by_bounds = ("varlen", "flash3", *(("auto",) if platform.device == "cuda" else ()))
    return not (kernel in by_bounds and precision != "fp32" and not getattr(model, "ranked", False))


@contextmanager
def ranks_that_send_nothing(tensor: int, context: int = 1, rank: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield the groups of tensor and of context parallelism of one of tensor x context ranks, which send nothing.

    megatron-core's layers need one. The group of an axis with one rank is None.
    """
    size = tensor * context
    if size == 1:
        yield None, None
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ctxlm_ds.parallel.megatron import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, create_gloo_process_groups=False)
        group = parallel_state.get_tensor_model_parallel_group() if tensor > 1 else None
        with warnings.catch_warnings():
            # torch warns of renamed collectives.
            warnings.simplefilter("ignore", FutureWarning)
            yield group, context_group(rank, size, tensor, context)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _kernels(asked: KernelsConfig, platform: Platform, precision: str) -> KernelSet:
    """Choose kernels that run on `meta` and keep the same tensors as those of the run."""
    attention = asked.attention if asked.attention in ("reference", "bmm") else "sdpa"
    plain = {
        "attention": "auto" if platform.device == "cpu" and asked.attention == "auto" else attention,
        "layer_norm": "reference" if asked.layer_norm == "reference" else "torch",
        "bias_gelu": "reference" if asked.bias_gelu == "reference" else "torch",
        "add_norm": "torch",
        # Keeps a mask, as compiled layers do whichever row they take.
        "dropout": asked.dropout if platform.device == "cpu" else "torch",
        "rotary": "torch",
        "sampling": "torch",
        "cross_entropy": asked.cross_entropy if asked.cross_entropy in ("auto", "full") else "chunked",
    }
    return KernelSet(dict(asked) | plain, platform.device, DTYPES[precision])


def describe(
    config: RunConfig,
    parallel: ParallelContext | None = None,
    platform: Platform = CUDA,
    kernels_of: Callable[[str], KernelSet] | None = None,
) -> Program:
    """Return the program of a run, with the teacher that the recipe describes.

    By default of the complete model, which is cached. `kernels_of` chooses kernels for a precision; None takes those
    that run on `meta`.
    """
    if parallel is None and kernels_of is None:
        key = config.model_dump_json(include=MEASURED), platform
        if key not in _described:
            _described[key] = describe(config, ParallelContext(), platform)
        return _described[key]
    objective, model, teacher = build_objective(config.objective), with_vocabulary(config.model), config.teacher
    if teacher.model is not None and not teacher.model.vocab_size:
        theirs = teacher.model.model_copy(update={"vocab_size": model.vocab_size})
        teacher = teacher.model_copy(update={"model": theirs})
    kernels_of = kernels_of or partial(_kernels, config.kernels, platform)
    build = ModelBuild(
        outputs=(*objective.outputs, *objective.taps),
        kernels=kernels_of(config.training.precision),
        parallel=parallel or ParallelContext(),
        recompute=True,
        shares_rows=config.data.shares_rows,
    )
    fields = [field.name for field in objective.fields(config.data)]
    read = [str(objective.written_tokens)] if config.evaluation.continues else ()
    return build_program(model, build, objective, teacher, kernels_of, read, fields)


def _measure(
    program: Program, fields: Sequence[Field], dtype: torch.dtype, platform: Platform, remainder: int
) -> MeasuredModel:
    further = MEASURED_ROWS * program.parallel.size * program.parallel.context_size
    rows = further + remainder
    fewer, more = (_Run(program, fields, dtype, platform, count).measure() for count in (rows, rows + further))

    def combine(first: Sequence[Trace], second: Sequence[Trace]) -> list[LayerWork]:
        made: dict[int, LayerWork] = {}
        for a, b in zip(first, second, strict=True):
            made.setdefault(id(a), LayerWork(a, b, rows, further))
        return [made[id(trace)] for trace in first]

    return MeasuredModel(
        layers=combine(fewer.layers, more.layers),
        frozen=[description.frozen for description in program.layers],
        recomputed=combine(fewer.recomputed, more.recomputed),
        loss=combine([fewer.loss], [more.loss])[0],
        flow=Flow(program.layers, program.outputs),
        tensor_bytes=[{name: size / rows for name, size in sizes.items()} for sizes in fewer.sizes],
        field_bytes={name: field.nbytes // rows for name, field in fewer.fields.items()},
    )


class _Run:
    """A run of all layers with one number of rows; a layer that computes like an earlier one is not run again."""

    def __init__(
        self, program: Program, fields: Sequence[Field], dtype: torch.dtype, platform: Platform, rows: int
    ) -> None:
        self._descriptions = program.layers
        self._parallel = program.parallel
        self._dtype = dtype
        self._device = torch.device(platform.device)
        self._terms = program.terms
        self._rows = rows
        self.fields = {}
        for field in fields:
            complete = torch.empty(rows, field.columns, dtype=getattr(torch, field.dtype), device="meta")
            self.fields[field.name] = own_share(complete, field.shared, program.parallel)
        self._meter = Meter(platform, program.parallel.traffic, self.fields)
        self._tensors = dict(self.fields)
        self._modules: dict[str | None, nn.Module] = {}
        self._constants = set(self.fields)
        self.layers: list[Trace] = []
        self.recomputed: list[Trace] = []
        self.sizes: list[dict[str, int]] = []

    def measure(self) -> _Run:
        done: list[tuple[LayerDescription, list[torch.Size], tuple[Trace, Trace]]] = []
        numbers = dropout_numbers(self._descriptions)
        for number, description in zip(numbers, self._descriptions, strict=True):
            self._note_sizes()
            shapes = [self._tensors[name].shape for name in description.needs()]
            traces = next((t for other, seen, t in done if other.computes_like(description) and seen == shapes), None)
            if traces is None:
                traces = self._run_layer(number, description)
                done.append((description, shapes, traces))
            plain, again = traces
            self.layers.append(plain)
            self.recomputed.append(again)
            self._tensors.update(zip(description.gives(), (x.detach() for x in plain.outputs), strict=True))
            self._constants -= set(description.gives())
            self._constants |= description.without_gradient()
        self._note_sizes()
        self.loss = self._run_loss()
        return self

    def _note_sizes(self) -> None:
        self.sizes.append({name: tensor.nbytes for name, tensor in self._tensors.items()})

    def _run_layer(self, number: int, description: LayerDescription) -> tuple[Trace, Trace]:
        module = self._module(description)
        inputs = [self._tensors[name] for name in description.needs()]
        parameters = list(module.parameters())
        constants = [place for place, name in enumerate(description.needs()) if name in self._constants]
        compares = "decode" in description.call_kwargs and len(inputs) > 1

        def run(description: LayerDescription, remember: bool) -> Trace:
            def call(*given: Tensor) -> list[Tensor]:
                tensors = dict(zip(description.needs(), given, strict=True))
                carried = carried_states([description])
                run_layer(description, module, tensors, number, self._parallel.dropout, carried)
                return [tensors[name] for name in description.gives()]

            return self._meter.count(call, inputs, parameters, remember, constants, compares)

        again = run(description, remember=False) if description.recompute else None
        plain = run(replace(description, recompute=False), remember=True)
        if compares:
            count, words = max(1, inputs[1].numel() // self._rows), len(parameters[0])
            plain = plain._replace(together=lambda rows: chunk_rows(rows * count, words, self._device) / count)
        return plain, again or plain

    def _module(self, description: LayerDescription) -> nn.Module:
        key = description.tie_key
        if key is None or key not in self._modules:
            with torch.device("meta"):
                module = description.build().to(description.dtype or self._dtype)
                self._modules[key] = OnDevice(module, self._meter.device)
        return self._modules[key]

    def _run_loss(self) -> Trace:
        # The terms of a teacher that the recipe does not describe are left out.
        terms = [term for term in self._terms if self._tensors.keys() >= {*term.outputs, *term.labels}]
        names = list(dict.fromkeys(name for term in terms for name in (*term.outputs, *term.labels)))

        def call(*given: Tensor) -> list[Tensor]:
            tensors = dict(zip(names, given, strict=True))
            return [
                load_object(term.reduce)(
                    [tensors[name] for name in term.outputs],
                    [tensors[name] for name in term.labels],
                    self._parallel,
                    **term.settings,
                ).loss
                for term in terms
            ]

        return self._meter.count(call, [self._tensors[name] for name in names])

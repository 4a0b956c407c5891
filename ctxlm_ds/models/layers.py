"""A model as one ordered list of layers with named tensors, and the module that runs such a list.

Each description names the tensors that its layer reads and writes; a tensor that no earlier layer writes is a field of
the batch. A tensor crosses a cut into pipeline stages only if a later layer reads it, so the list can be cut anywhere.
A layer that occurs several times (a tied one) has the same tie key each time and is one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.parameters import freeze


@dataclass(frozen=True)
class ModelBuild:
    """Everything that a family's list of layers depends on in addition to the model's settings."""

    outputs: tuple[str, ...]
    """Tensors that the objective needs from the model; they decide its heads."""
    kernels: KernelSet
    parallel: ParallelContext = field(default_factory=ParallelContext)
    """This rank's share of every layer; the default is the complete model."""
    recompute: bool = False
    """True if the backward pass computes the repeated layers again."""
    compile: bool | str = False
    """True if torch.compile compiles the repeated layers, or the mode in which it does."""
    shares_rows: bool = False
    """True if a row holds several sequences that never see each other."""

    def with_outputs(self, names: Sequence[str]) -> ModelBuild:
        """Return the build of a model with further outputs."""
        return replace(self, outputs=tuple(dict.fromkeys([*self.outputs, *names])))


class CarriedStates:
    """Tensors that one rank's layers carry between steps (truncated backpropagation over lanes of text).

    A layer names them in LayerDescription.carries. It reads the tensor that it wrote for the same rows in the previous
    step, detached, or None in the first step. The key is the number of the micro-batch in the global batch, so a resume
    on another number of data-parallel ranks finds them. Every tensor-parallel rank holds them completely. They are
    inputs of the layer, so a recomputed layer reads the same ones. An evaluation begins without tensors and carries its
    own, so that it changes nothing of the training.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = tuple(sorted(names))
        self._number = 0
        self._held: dict[tuple[str, int], Tensor] = {}
        self._written: dict[tuple[str, int], Tensor] = {}
        self._evaluated: dict[tuple[str, int], Tensor] | None = None

    @property
    def is_evaluating(self) -> bool:
        """True from begin_evaluation to end_evaluation."""
        return self._evaluated is not None

    def begin_evaluation(self) -> None:
        """Carry other tensors, none at first, until end_evaluation."""
        self._evaluated = {}

    def end_evaluation(self) -> None:
        """Discard the evaluation's tensors and return to those of the training."""
        self._evaluated = None

    def begin(self, micro_batch: int) -> None:
        """Select the micro-batch of the next forward pass by its number in the global batch."""
        self._number = micro_batch

    def take(self, name: str) -> Tensor | None:
        """Return the tensor of the selected micro-batch; None if no step has written it."""
        held = self._held if self._evaluated is None else self._evaluated
        return held.get((name, self._number))

    def put(self, name: str, value: Tensor) -> None:
        """Keep a tensor for the next step."""
        written = self._written if self._evaluated is None else self._evaluated
        written[name, self._number] = value.detach()

    def end_step(self, keep: bool) -> None:
        """Keep the step's tensors for the next step, or discard them."""
        if keep:
            self._held.update(self._written)
        self._written = {}

    def named(self) -> dict[str, Tensor]:
        """Return every tensor under `NAME.NUMBER`, for a checkpoint."""
        return {f"{name}.{number}": value for (name, number), value in self._held.items()}

    def load(self, named: dict[str, Tensor]) -> None:
        """Replace all tensors by those of a checkpoint."""
        self._held, self._written = {}, {}
        for key, value in named.items():
            name, _, number = key.rpartition(".")
            self._held[name, int(number)] = value


Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class LayerDescription:
    """One layer of a model, not built yet."""

    name: str
    """Prefix of its parameters' names; dots make nested names (`encoder.0`)."""
    factory: Callable[..., nn.Module]
    """Builds the module from `kwargs`."""
    reads: tuple[str, ...]
    """Tensors that its forward takes, in this order."""
    writes: tuple[str, ...]
    """Tensors that its forward returns: one tensor, or a tuple in this order."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tie_key: str | None = None
    """Layers with the same key are one module (built from the first of them)."""
    call_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of its forward at this position in the list."""
    no_gradient: frozenset[str] = frozenset()
    """Those of `writes` through which no gradient flows (ids, masks, a teacher's outputs)."""
    carries: frozenset[str] = frozenset()
    """Tensors of `reads` and `writes` that it carries between steps (CarriedStates)."""
    recompute: bool = False
    """Keep only its inputs and compute it again in the backward pass."""
    compile: bool | str = False
    """Run it through torch.compile: True, or a mode of torch.compile."""
    block: bool = False
    """True for the model's repeated layers. A pipeline may be cut before a block."""
    once: bool = False
    """True for a tied layer before each block that reads its output, if the output (a relative bias) is cheaper to
    compute on each pipeline stage than to send. A stage runs only the first of them, a cut before the block is before
    it too."""
    frozen: bool = False
    """True for a teacher's layer: it is not trained and runs without gradients and dropout."""
    dtype: torch.dtype | None = None
    """Data type of its parameters and outputs if it is not that of the run; a frozen layer may have its own."""

    def computes_like(self, other: LayerDescription) -> bool:
        """Return True if both layers do the same work on tensors of the same shapes."""
        return (
            self.factory is other.factory
            and self.kwargs == other.kwargs
            and self.call_kwargs == other.call_kwargs
            and (self.recompute, self.compile, self.frozen) == (other.recompute, other.compile, other.frozen)
            and self.dtype == other.dtype
        )

    def needs(self) -> tuple[str, ...]:
        """Return the tensors that it reads from earlier layers and the batch."""
        return tuple(name for name in self.reads if name not in self.carries)

    def gives(self) -> tuple[str, ...]:
        """Return the tensors that it writes for later layers."""
        return tuple(name for name in self.writes if name not in self.carries)

    def without_gradient(self) -> frozenset[str]:
        """Return those of `writes` through which no gradient flows."""
        return frozenset(self.writes) if self.frozen else self.no_gradient

    def build(self) -> nn.Module:
        """Build the module; its parameters are allocated and unset."""
        module = self.factory(**self.kwargs)
        if self.frozen:
            freeze(module)
        if self.compile:
            module.compile(dynamic=False, mode=None if self.compile is True else self.compile)
        return module


def parameter_prefixes(descriptions: Sequence[LayerDescription]) -> list[str]:
    """Return the prefix of each layer's parameters; a tied layer has the name of its first occurrence."""
    first: dict[str, str] = {}
    return [first.setdefault(d.tie_key, d.name) if d.tie_key else d.name for d in descriptions]


def dropout_numbers(descriptions: Sequence[LayerDescription]) -> list[int]:
    """Return the number of each layer in the keys of dropout; a teacher's layers, which drop nothing, count none."""
    counts = accumulate((not description.frozen for description in descriptions), initial=0)
    return list(counts)[:-1]


def repeated_layers(descriptions: Sequence[LayerDescription]) -> frozenset[int]:
    """Return the layers of one stage that need not run, because their output is still that of an earlier occurrence."""
    valid: dict[str | None, LayerDescription] = {}
    repeated = set()
    for index, description in enumerate(descriptions):
        if description.once and valid.get(description.tie_key) == description:
            repeated.add(index)
            continue
        changed = set(description.writes)
        valid = {key: other for key, other in valid.items() if not changed & {*other.reads, *other.writes}}
        if description.once:
            valid[description.tie_key] = description
    return frozenset(repeated)


@dataclass(frozen=True)
class Crossing:
    """The tensors that a layer and those after it need, in the order in which they cross a cut before it."""

    with_gradient: tuple[str, ...]
    """Tensors of a layer that receive a gradient."""
    without_gradient: tuple[str, ...]
    """Fields of the batch, and tensors of layers without a gradient."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.with_gradient + self.without_gradient


class Flow:
    """The tensors that are needed before each layer of a list."""

    def __init__(self, descriptions: Sequence[LayerDescription], outputs: Sequence[str]) -> None:
        """Follow the tensors from the last layer, after which `outputs` are needed; ValueError if none writes one."""
        self.outputs = tuple(outputs)
        written = {name for description in descriptions for name in description.gives()}
        unknown = [name for name in self.outputs if name not in written]
        if unknown:
            raise ValueError(f"no layer writes {', '.join(unknown)}; the layers write {', '.join(sorted(written))}")
        alive: tuple[str, ...] = self.outputs
        before = [alive]
        for description in reversed(descriptions):
            kept = [name for name in alive if name not in description.writes]
            alive = tuple(dict.fromkeys([*description.needs(), *kept]))
            before.append(alive)
        self._before = before[::-1]
        self._gradient: list[frozenset[str]] = [frozenset()]
        for description in descriptions:
            written_here = frozenset(description.gives())
            flowing = (self._gradient[-1] - written_here) | (written_here - description.without_gradient())
            self._gradient.append(flowing)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Fields of the batch that the layers read, in a fixed order."""
        return tuple(sorted(self._before[0]))

    def before(self, index: int) -> Crossing:
        """Return the tensors that layer `index` and those after it need from the layers before."""
        alive = sorted(self._before[index])
        flowing = self._gradient[index]
        return Crossing(
            tuple(name for name in alive if name in flowing), tuple(name for name in alive if name not in flowing)
        )


def run_layer(
    description: LayerDescription,
    module: nn.Module,
    tensors: dict[str, Tensor],
    index: int,
    streams: DropoutStreams,
    carried: CarriedStates,
) -> None:
    """Run one layer on `tensors`, from which it reads and in which it stores its outputs.

    `index` is the layer's number in the keys of dropout (dropout_numbers); a recomputed layer has the same keys.
    """
    if description.frozen and module.training:
        module.eval()
    keeps = description.carries if module.training or carried.is_evaluating else frozenset()
    inputs = [
        (carried.take(name) if name in keeps else None) if name in description.carries else tensors[name]
        for name in description.reads
    ]
    keys = streams.layer(index)

    def call(*arguments: Tensor | None) -> Any:
        streams.use(keys)
        return module(*arguments, **description.call_kwargs)

    if description.frozen:
        with torch.no_grad():
            outputs = call(*inputs)
    elif description.recompute and module.training:
        outputs = checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=not streams.enabled)
    else:
        outputs = call(*inputs)
    written = outputs if isinstance(outputs, tuple) else (outputs,)
    stopped = description.without_gradient()
    for name, value in zip(description.writes, written, strict=True):
        if name not in description.carries:
            # Detach as after a cut, so that every layout computes the same.
            tensors[name] = value.detach() if name in stopped else value
        elif name in keeps:
            carried.put(name, value)


def carried_states(descriptions: Sequence[LayerDescription]) -> CarriedStates:
    """Return the carried tensors of these layers, all unset."""
    return CarriedStates({name for description in descriptions for name in description.carries})


class LayerSequence(nn.Module):
    """Runs a list of layers one after the other in one process."""

    def __init__(
        self, descriptions: Sequence[LayerDescription], outputs: Sequence[str], streams: DropoutStreams | None = None
    ) -> None:
        """Build the layers in order; `outputs` are the tensors to return, `streams` the layers' keys of dropout."""
        super().__init__()
        repeated = repeated_layers(descriptions)
        running = [index for index in range(len(descriptions)) if index not in repeated]
        self.flow = Flow([descriptions[index] for index in running], outputs)
        self.inputs, self.outputs = self.flow.inputs, self.flow.outputs
        """Names of the batch's fields that forward takes, and of the tensors that it returns, in its order."""
        self.streams = streams or DropoutStreams()
        self.streams.num_layers = len(descriptions)
        self.carried = carried_states(descriptions)
        tied: dict[str, nn.Module] = {}
        numbers = dropout_numbers(descriptions)
        self._numbers = [numbers[index] for index in running]
        self._steps: list[tuple[LayerDescription, nn.Module, frozenset[str]]] = []
        for place, index in enumerate(running):
            description = descriptions[index]
            module = tied.get(description.tie_key) if description.tie_key else None
            if module is None:
                module = description.build()
                self._register(description.name, module)
                if description.tie_key:
                    tied[description.tie_key] = module
            self._steps.append((description, module, frozenset(self.flow.before(place + 1).names)))

    def _register(self, name: str, module: nn.Module) -> None:
        *containers, last = name.split(".")
        parent: nn.Module = self
        for container in containers:
            if not hasattr(parent, container):
                parent.add_module(container, nn.Module())
            parent = getattr(parent, container)
        parent.add_module(last, module)

    def forward(self, inputs: Tensors) -> Tensors:
        """Run the layers on the tensors of `self.inputs`; return those of `self.outputs`."""
        tensors = dict(zip(self.inputs, inputs, strict=True))
        for number, (description, module, needed) in zip(self._numbers, self._steps, strict=True):
            run_layer(description, module, tensors, number, self.streams, self.carried)
            for name in [name for name in tensors if name not in needed]:
                del tensors[name]
        return tuple(tensors[name] for name in self.outputs)

    def run(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the model on a batch's fields by name; return its outputs by name."""
        outputs = self(tuple(fields[name] for name in self.inputs))
        return dict(zip(self.outputs, outputs, strict=True))

"""Run a recipe's model forward and backward on fake CUDA tensors, which have shapes and types and no data.

The branches, kernels and operators are those of a GPU; the planner's `meta` device takes none of them. Functions that
torch.compile would make one kernel of run operator by operator. device_guard.py must be loaded first.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ctxlm_ds.errors import VerifyError
from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
from ctxlm_ds.models.layers import Flow, LayerSequence, parameter_prefixes
from ctxlm_ds.models.program import Program
from ctxlm_ds.models.stages import plan_stages
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.mappings import own_share
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.process.patches import replaced
from ctxlm_ds.recipe.schema import ParallelConfig, RunConfig, TrainingConfig
from ctxlm_ds.training.engine.losses import TermLosses
from ctxlm_ds.training.engine.runtime import parallel_context
from ctxlm_ds.training.measure import describe, ranks_that_send_nothing

DEVICE = torch.device("cuda", 0)
OF_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
Place = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class FakePass:
    """What a forward and a backward pass of one micro-batch did."""

    kernels: dict[str, str]
    outputs: dict[str, tuple[tuple[int, ...], Place]]
    """Shape and place of each tensor that the loss terms read."""
    parameters: dict[str, Place]
    """The trained ones; a tied one has a copy on each later stage that uses it, named `NAME of stage K`."""
    gradients: dict[str, Place]
    forward: Counter[str]
    """Operators that reached the device, by name, with their number of calls."""
    backward: Counter[str]


@contextmanager
def fake_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Make torch find a CUDA device of this compute capability, and make every new tensor a fake one."""
    with ExitStack() as stack, warnings.catch_warnings():
        # torch warns that the CPU's build has no such device.
        warnings.simplefilter("ignore")
        stack.enter_context(replaced(torch.cuda, "is_available", lambda: True))
        stack.enter_context(replaced(torch.cuda, "get_device_capability", lambda device=None: capability))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Keys of dropout come from numpy.
        stack.enter_context(fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))
        yield


class FakeModel:
    """The model of a recipe, built under `fake_cuda` in the run's type with the kernels that the run would take."""

    def __init__(self, config: RunConfig, parallel: ParallelContext | None = None) -> None:
        """Choose the kernels and build the layers. Raises KernelError if one that the recipe names cannot run."""
        self._kernels_of = cache(lambda precision: KernelSet(dict(config.kernels), DEVICE.type, DTYPES[precision]))
        if parallel is None:
            parallel = parallel_context(config.parallel, config.training, config.model.drops, Topology())
        self._config = config
        self._program = describe(config, parallel, kernels_of=self._kernels_of)
        layers = self._program.layers
        self.bounds = [0, len(layers)]
        """First layer of each pipeline stage, and the number of layers."""
        if config.parallel.pipeline_parallel_size > 1:
            self.bounds = plan_stages(config.parallel, layers, self._program.trained_shapes)
        self._flow = Flow(layers, self._program.outputs)
        dtype = DTYPES[config.training.precision]
        self._stages = _build(self._program, self.bounds, dtype, config.training.activation_checkpointing)

    @property
    def kernels(self) -> dict[str, str]:
        """Operation -> name of its implementation, of those that layers use."""
        return self._kernels_of(self._config.training.precision).names

    def run(self) -> FakePass:
        """Run one micro-batch and its losses through all stages. Raises VerifyError if an operator stops it."""
        config, program = self._config, self._program
        fields, rows = build_objective(config.objective).fields(config.data), config.training.micro_batch_size
        with DEVICE:
            complete = {f: torch.zeros(rows, f.columns, dtype=getattr(torch, f.dtype)) for f in fields}
            factors = torch.ones(len(program.terms))
        batch = {f.name: own_share(values, f.shared, program.parallel) for f, values in complete.items()}
        losses = TermLosses(program.terms, program.outputs, program.parallel)
        forward, backward = _Operators(), _Operators()
        with forward:
            program.parallel.dropout.begin(0, 0, DEVICE)
            outputs, cuts = self._forward(batch)
            loss, _ = losses(outputs, batch, factors)
        with backward:
            loss.backward()
            for sent, received in reversed(cuts):
                pairs = [(x, leaf.grad) for x, leaf in zip(sent, received, strict=True) if leaf.grad is not None]
                if pairs:
                    torch.autograd.backward(*zip(*pairs, strict=True))
        trained: dict[str, nn.Parameter] = {}
        for number, stage in enumerate(self._stages):
            for name, value in stage.named_parameters():
                if program.facts[name].trained:
                    trained[f"{name} of stage {number}" if name in trained else name] = value
        return FakePass(
            self.kernels,
            {name: (tuple(value.shape), _place(value)) for name, value in outputs.items()},
            {name: _place(value) for name, value in trained.items()},
            {name: _place(value.grad) for name, value in trained.items() if value.grad is not None},
            forward.calls,
            backward.calls,
        )

    def _forward(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[tuple[list[Tensor], list[Tensor]]]]:
        """Return the outputs, and for each cut the tensors with a gradient before it and after it."""
        tensors, cuts = dict(batch), []
        for start, stage in zip(self.bounds, self._stages, strict=False):
            if start > 0:
                names = [name for name in self._flow.before(start).with_gradient if tensors[name].requires_grad]
                sent = [tensors[name] for name in names]
                received = [x.detach().requires_grad_() for x in sent]
                tensors |= zip(names, received, strict=True)
                cuts.append((sent, received))
            tensors |= stage.run(tensors)
        return {name: tensors[name] for name in self._program.outputs}, cuts


@contextmanager
def rank_that_sends_nothing(
    layout: ParallelConfig, training: TrainingConfig, drops: bool, rank: int
) -> Iterator[ParallelContext]:
    """Yield one of the layout's tensor x context ranks, in process groups whose collectives do nothing."""
    tensor, context = layout.tensor_parallel_size, layout.context_parallel_size
    with ranks_that_send_nothing(tensor, context, rank) as (tensor_group, row_group):
        topology = Topology(
            tensor_parallel_rank=rank % tensor,
            tensor_parallel_size=tensor,
            context_parallel_rank=rank // tensor,
            context_parallel_size=context,
            tensor_group=tensor_group,
            context_group=row_group,
        )
        yield parallel_context(layout, training, drops, topology)


def _place(value: Tensor) -> Place:
    return value.dtype, value.device


def _build(program: Program, bounds: Sequence[int], dtype: torch.dtype, recomputes: bool) -> list[LayerSequence]:
    """Build each stage in the run's type, a teacher in its own: a module of fake tensors cannot be converted."""

    @cache
    def in_type(factory: Callable[..., nn.Module], own: torch.dtype | None) -> Callable[..., nn.Module]:
        def build(**arguments: Any) -> nn.Module:
            before = torch.get_default_dtype()
            torch.set_default_dtype(own or dtype)
            try:
                return factory(**arguments)
            finally:
                torch.set_default_dtype(before)

        return build

    layers = [
        replace(
            layer, name=prefix, factory=in_type(layer.factory, layer.dtype), recompute=layer.recompute and recomputes
        )
        for layer, prefix in zip(program.layers, parameter_prefixes(program.layers), strict=True)
    ]
    flow, stages = Flow(layers, program.outputs), []
    for start, stop in pairwise(bounds):
        written = {name for layer in layers[start:stop] for name in layer.gives()}
        leaving = [name for name in flow.before(stop).names if name in written]
        with DEVICE:
            stages.append(LayerSequence(layers[start:stop], leaving, program.parallel.dropout))
    return stages


class _Operators(TorchDispatchMode):
    """Counts operators, and names one that has no fake form."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # questions to a tensor
            self.calls[str(func)] += 1
        try:
            return func(*args, **(kwargs or {}))
        except OF_VALUES as error:
            raise VerifyError(f"the shape of {func}'s result depends on values, so a GPU would wait for it") from error
        except (fake_tensor.UnsupportedOperatorException, NotImplementedError) as error:
            raise VerifyError(f"{func} has no fake form; register one by torch.library.register_fake") from error

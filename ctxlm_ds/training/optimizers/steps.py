"""The steps of an optimizer whose update of an element may depend on its complete parameter, under every ZeRO stage.

DeepSpeed hands an optimizer flat partitions. `bind` sets which parameter each range of them belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.sections import MOMENTS
from ctxlm_ds.training.engine.fragments import Fragment

if TYPE_CHECKING:
    from ctxlm_ds.training.optimizers.base import Optimizer

CHUNK_ELEMENTS = 2**18
"""On a CPU, all operations of an update run on a range of this size before the next; 20 % faster than on a tensor."""


@dataclass(frozen=True)
class ParameterLayout:
    """Where the parameters are after the engine has laid them out."""

    fragments: Sequence[Fragment]
    """Those of this rank."""
    shapes: Mapping[str, tuple[int, ...]]
    """All parameters in an order common to all ranks, with their full shapes."""
    facts: Mapping[str, ParameterFacts]
    flat_tensors: Sequence[torch.Tensor] = ()
    """Owners of fragments in an order common to all ranks; empty under stage 0, where each parameter is one."""
    sharers: Sharers = field(default_factory=lambda: Sharers(Topology(), 0, torch.device("cpu")))
    """By default this rank holds complete parameters alone."""


class Part(NamedTuple):
    """A fragment's range of a tensor that is laid out as its owner."""

    number: int
    """Number of the parameter among all names."""
    fragment: Fragment
    values: torch.Tensor
    """A view, [length]."""


class Stepper(torch.optim.Optimizer):
    """An optimizer of torch that updates flat partitions of parameters by the rule of an entry.

    `bind` must be called once the engine has laid out the parameters.
    """

    def __init__(self, params: Iterable[Any], rule: Optimizer) -> None:
        super().__init__(params, {"lr": rule.settings.learning_rate} | rule.group_settings("weights"))
        self.rule = rule
        self.layout = ParameterLayout((), {}, {})
        self._fragments: dict[int, list[tuple[int, Fragment]]] = {}

    def bind(self, layout: ParameterLayout) -> None:
        """Set which parameter each range of each flat tensor belongs to; all ranks call it."""
        self.layout = layout
        position = {name: index for index, name in enumerate(layout.shapes)}
        self._fragments = {}
        for fragment in layout.fragments:
            self._fragments.setdefault(id(fragment.owner), []).append((position[fragment.name], fragment))
        self.rule.bind(layout)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            # Stage 3 steps one group at a time and leaves the others empty.
            if parameters:
                self.rule.step_group(self, group, parameters)

    def next_state(self, parameter: torch.Tensor, moments: Sequence[str], start: float = 0.0) -> dict[str, Any]:
        """Return a parameter's state with this step counted; its moments are `start` before the first."""
        state = self.state[parameter]
        if not state:
            state |= {"step": 0} | {kind: torch.full_like(parameter, start) for kind in moments}
        state["step"] += 1
        return state

    def adamw_direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return AdamW's step for a rate of 1, weight decay added."""
        state = self.next_state(parameter, MOMENTS)
        beta1, beta2 = self.rule.settings.betas
        assert parameter.grad is not None
        correction1 = 1 - beta1 ** state["step"]
        correction2 = 1 - beta2 ** state["step"]
        update = torch.empty_like(parameter)
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], update)
        for weight, grad, first, second, output in ranges_of(*tensors):
            first.lerp_(grad, 1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            denominator = (second / correction2).sqrt_().add_(self.rule.settings.eps)
            torch.div(first, correction1, out=output).div_(denominator).add_(weight, alpha=group["weight_decay"])
        return update

    def parts(self, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Iterator[Part]:
        """Yield the range of each fragment of `parameters` in `tensors`, which have the same shapes."""
        for parameter, tensor in zip(parameters, tensors, strict=True):
            for number, fragment in self._fragments.get(id(parameter), []):
                yield Part(number, fragment, tensor.view(-1).narrow(0, fragment.offset, fragment.length))

    def squares(self, device: torch.device, *rows: Iterable[Part]) -> torch.Tensor:
        """Return the squared norms of complete parameters over all ranks, float64 [rows, parameters].

        Those of parameters without a part on any rank are 0. Ranks that step the same parameters call it together.
        """
        squares = torch.zeros(len(rows), len(self.layout.shapes), dtype=torch.float64, device=device)
        for row, parts in enumerate(rows):
            counted = [part for part in parts if not part.fragment.holding.tensor_duplicate]
            if counted:
                norms = torch.stack(torch._foreach_norm([part.values for part in counted], dtype=torch.float64))
                squares[row, [part.number for part in counted]] = norms.square()
        self.layout.sharers.add_up(squares)
        return squares


def ranges_of(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield flat ranges of tensors of one size: on a CPU pieces that fit the cache, elsewhere the complete tensors."""
    first = tensors[0]
    size = CHUNK_ELEMENTS if first.device.type == "cpu" else max(1, first.numel())
    return zip(*(tensor.reshape(-1).split(size) for tensor in tensors), strict=True)


class Sharers:
    """The ranks of one pipeline stage: its tensor-parallel, context-parallel and data-parallel ranks."""

    def __init__(self, topology: Topology, zero_stage: int, device: torch.device) -> None:
        """Take the ranks; `device` is that of the training backend, which offloaded tensors are moved to."""
        self._topology = topology
        self._partitioned = zero_stage > 0
        self.device = device
        self.size = topology.tensor_parallel_size * topology.replica_size
        self._first = topology.pipeline_parallel_rank * self.size
        self.rank = topology.rank - self._first

    def gather(self, value: Any) -> list[Any]:
        """Return the picklable `value` of each rank; all ranks of all stages call it."""
        return self._topology.all_gather_object(value)[self._first : self._first + self.size]

    def add_up(self, tensor: torch.Tensor) -> None:
        """Add up a tensor in place over the ranks that hold different parts of the parameters.

        Under ZeRO stage 0 these are the tensor-parallel ranks only.
        """
        group = self._topology.replica_group if self._partitioned else self._topology.tensor_group
        if (self.size if self._partitioned else self._topology.tensor_parallel_size) > 1:
            # Offloaded weights are in CPU memory, which nccl cannot reduce.
            moved = tensor.to(self.device)
            torch.distributed.all_reduce(moved, group=group)
            tensor.copy_(moved)

    def exchange(self, packed: torch.Tensor, sizes: list[int], lengths: list[int]) -> Sequence[torch.Tensor]:
        """Send a range of a tensor to each rank and return what each has sent; all ranks of the stage call it.

        `packed` is 1-D, on `device`, of one data type on all ranks; `sizes` are elements to each rank, `lengths` from
        each.
        """
        received = packed.new_empty(sum(lengths))
        torch.distributed.all_to_all_single(received, packed, lengths, sizes, group=self._topology.replica_group)
        return received.split(lengths)

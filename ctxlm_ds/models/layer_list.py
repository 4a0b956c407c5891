"""A model as one ordered list of layers, and the module that runs such a list.

Every layer takes one tuple of tensors and returns one, of constant shapes; what no later layer needs is dropped from
it, so that the list can be cut anywhere into pipeline stages. A layer that occurs twice (a tied one) has the same tie
key both times and is one module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ctxlm_ds.parallel.random import DropoutStreams

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class LayerDescription:
    """One layer of a model, not built yet."""

    name: str
    """Prefix of its parameters' names; dots make nested names (`encoder.0`)."""
    factory: Callable[..., nn.Module]
    """Makes the module from `kwargs`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tie_key: str | None = None
    """Layers with the same key are one module (built from the first of them)."""
    call_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of its forward at this place in the list."""
    recompute: bool = False
    """Keep only its input and compute it again in the backward pass."""
    compile: bool = False
    """Run it through torch.compile."""
    block: bool = False
    """One of the model's repeated layers, before which a pipeline may be cut."""

    def build(self) -> nn.Module:
        """The module, its parameters allocated and unset."""
        module = self.factory(**self.kwargs)
        if self.compile:
            module.compile(dynamic=False)
        return module


def run_layer(
    description: LayerDescription, module: nn.Module, tensors: Tensors, index: int, streams: DropoutStreams
) -> Tensors:
    """One layer's forward pass: `module` was built from `description`, which is number `index` of the list.

    While training it draws from a dropout stream of its own, and again from the same one where it is recomputed.
    """
    if not module.training:
        return module(tensors, **description.call_kwargs)
    micro_batch = streams.micro_batch

    def call(inputs: Tensors) -> Tensors:
        streams.start_layer(micro_batch, index)
        return module(inputs, **description.call_kwargs)

    if description.recompute:
        return checkpoint(call, tensors, use_reentrant=False, preserve_rng_state=not streams.enabled)
    return call(tensors)


class LayerSequence(nn.Module):
    """Runs a list of layers one after the other in one process."""

    def __init__(self, descriptions: Sequence[LayerDescription], streams: DropoutStreams | None = None) -> None:
        """`streams` are those that the layers were made with; None where they drop nothing."""
        super().__init__()
        self.streams = streams or DropoutStreams()
        tied: dict[str, nn.Module] = {}
        self._steps: list[tuple[LayerDescription, nn.Module]] = []
        for description in descriptions:
            module = tied.get(description.tie_key) if description.tie_key else None
            if module is None:
                module = description.build()
                self._register(description.name, module)
                if description.tie_key:
                    tied[description.tie_key] = module
            self._steps.append((description, module))

    def _register(self, name: str, module: nn.Module) -> None:
        *containers, last = name.split(".")
        parent: nn.Module = self
        for container in containers:
            if not hasattr(parent, container):
                parent.add_module(container, nn.Module())
            parent = getattr(parent, container)
        parent.add_module(last, module)

    def forward(self, inputs: Tensors) -> Tensors:
        """The first layer's inputs (Batch.model_inputs()) -> the last layer's outputs."""
        tensors = inputs
        for index, (description, module) in enumerate(self._steps):
            tensors = run_layer(description, module, tensors, index, self.streams)
        return tensors

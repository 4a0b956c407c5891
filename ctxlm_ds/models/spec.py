"""What a family's list of layers depends on in addition to the model's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.parallel.context import ParallelContext


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

"""The interface of an optimizer: its settings, its facts and its update, in one file that imports torch late.

The facts are class variables of the settings' section (recipe/sections.py), which checks, the planner, checkpoints and
the rules of DeepSpeed's JSON ask. One line of registry.py names the optimizer; other packages use an entry point
(docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ctxlm_ds.errors import KernelError
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import OptimizerSection, PositiveFraction, Probability
from ctxlm_ds.registry import OPTIMIZERS

if TYPE_CHECKING:
    import torch

    from ctxlm_ds.training.optimizers.steps import ParameterLayout, Stepper

AdamFactory = Callable[..., "torch.optim.Optimizer"]
"""Class of an optimizer of another library."""
FLOAT = 4
"""Bytes of an element of an update."""
GroupKind = Literal["matrices", "weights", "rest", "fixed"]
"""Matrices that an update takes complete; other parameters that decay; biases and LayerNorm; what keeps its value."""


@dataclass(frozen=True, slots=True)
class OptimizerPlace:
    """The device and the ZeRO stage that an optimizer works under."""

    device_type: str
    """`cpu` or `cuda`: the device of the fp32 weights."""
    zero_stage: int
    offloaded: bool
    """True if the fp32 weights are in CPU memory while the model is on the accelerator (or ZeRO-Offload is set)."""
    adam: Callable[[], AdamFactory]
    """Returns DeepSpeed's class for this place, or raises KernelError if it cannot be built."""


class Optimizer:
    """One optimizer. A subclass names its section and updates the parameters of a group in `step_group`."""

    section: ClassVar[type[OptimizerSection]]

    def __init__(self, settings: Any) -> None:
        """Take the section of the recipe."""
        self.settings = settings

    def group_settings(self, kind: GroupKind) -> dict[str, Any]:
        """Return the entries of a parameter group in addition to its parameters and the learning rate."""
        if kind == "fixed":
            return {"weight_decay": 0.0, "moves": 0.0}
        decays = kind != "rest" or self.settings.decay_biases
        return {"weight_decay": self.settings.weight_decay if decays else 0.0}

    def build(
        self, groups: list[dict[str, Any]], kernel: str, place: OptimizerPlace
    ) -> tuple[torch.optim.Optimizer, str]:
        """Build torch's optimizer for groups of `parameter_groups`; return it, and the implementation as it is logged.

        Raises KernelError if the requested implementation cannot run here, and ConfigError if it cannot be exact under
        this ZeRO stage.
        """
        from ctxlm_ds.training.optimizers.steps import Stepper

        name = self.settings.name
        if kernel not in self.settings.kernels:
            raise KernelError(f"kernels.optimizer is {kernel}, which has no exact {name}; set kernels.optimizer: auto")
        return Stepper(groups, self), f"{name}=native"

    def bind(self, layout: ParameterLayout) -> None:
        """Prepare for the parameters as the engine has laid them out; all ranks call it once."""

    def step_group(self, states: Stepper, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Update flat fp32 tensors of a group that have a gradient, as ZeRO partitions them, in place.

        `states` has the moments, and the norms of complete parameters; `lr` of the group is the rate of this step.
        """
        raise NotImplementedError


class AdamSection(OptimizerSection):
    """Settings of optimizers with the two moments of Adam."""

    json_params: ClassVar = {**OptimizerSection.json_params, "betas": "betas", "eps": "eps"}

    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: PositiveFraction = 1e-6
    """Added to the square root of the second moment."""

    def problems(self, kernel: str) -> Iterator[Problem]:
        yield from super().problems(kernel)
        if max(self.betas) >= 1.0:
            yield Problem("optimizer.betas", f"{list(self.betas)}: with 1 a moment never changes; expected below 1")


def optimizer_of(settings: OptimizerSection) -> Optimizer:
    """Return the optimizer of a recipe's section."""
    return OPTIMIZERS.get(settings.name)(settings)

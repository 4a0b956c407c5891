"""Build a model from the recipe's `model` section: its list of layers, or one module with initial values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
from ctxlm_ds.models.initialize import initial_value, initialize_parameters
from ctxlm_ds.models.layers import LayerDescription, LayerSequence, parameter_prefixes
from ctxlm_ds.models.parts.comparison import Comparison, with_comparisons
from ctxlm_ds.models.parts.distillation import is_tap, needed_layers, teacher_layers, together, with_taps
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.parameters import ParameterFacts, collect_facts
from ctxlm_ds.recipe.schema import KernelsConfig, RunConfig
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.registry import FAMILIES, load_object


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


def build_layer_list(model: ModelSection, build: ModelBuild) -> list[LayerDescription]:
    """List the model's layers in order, not yet built.

    Raises:
        ConfigError: the shape is impossible, or the family has no head for an output.
    """
    if model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set: give it in the recipe or take the tokenizer's size")
    problem = next(model.problems(), None)
    if problem is not None:
        raise ConfigError(f"{problem.path}: {problem.text}")
    family = FAMILIES.get(model.family)
    taps = [name for name in build.outputs if is_tap(name)]
    missing = [name for name in build.outputs if name not in family.outputs and name not in taps]
    if missing:
        raise ConfigError(f"model.family {model.family} cannot compute {', '.join(missing)} that the objective needs")
    return with_taps(load_object(family.layers)(model, build), taps)


def build_run_layers(
    config: RunConfig,
    build: ModelBuild,
    teacher_outputs: Sequence[str],
    kernels_of: Callable[[str], KernelSet],
    comparisons: Callable[[ModelSection, ModelSection], Sequence[Comparison]] = lambda model, teacher: (),
) -> list[LayerDescription]:
    """List the layers of a run: those of its model, and of the teacher that the objective compares it with.

    Args:
        config: the recipe; model.vocab_size and, with a teacher, teacher.model and its vocab_size are set.
        build: for the model.
        teacher_outputs: what the objective needs from a teacher (Objective.teacher_outputs); empty for no teacher.
        kernels_of: chooses kernels for a precision, which may differ for the teacher.
        comparisons: Objective.comparisons.

    Raises:
        ConfigError: as build_layer_list.
    """
    if not teacher_outputs:
        return build_layer_list(config.model, build)
    settings = config.teacher
    assert settings.model is not None
    compared = comparisons(config.model, settings.model)
    layers = build_layer_list(config.model, with_outputs(build, [comparison.student for comparison in compared]))
    teacher = build_teacher_layers(config, build, teacher_outputs, kernels_of, compared)
    dtype = DTYPES[settings.precision] if settings.precision != "run" else None
    joined = together(layers, teacher_layers(teacher, dtype=dtype), last=settings.placement == "last")
    return with_comparisons(joined, compared, build)


def build_teacher_layers(
    config: RunConfig,
    build: ModelBuild,
    teacher_outputs: Sequence[str],
    kernels_of: Callable[[str], KernelSet],
    compared: Sequence[Comparison],
) -> list[LayerDescription]:
    """List the layers of a teacher that the losses need, under their own names.

    The arguments are those of build_run_layers, and what to compare.

    Raises:
        ConfigError: as build_layer_list.
    """
    settings = config.teacher
    assert settings.model is not None
    kernels = kernels_of(settings.precision) if settings.precision != "run" else build.kernels
    teacher_build = replace(build, outputs=tuple(teacher_outputs), kernels=kernels, recompute=False)
    teacher_build = with_outputs(teacher_build, [comparison.teacher for comparison in compared])
    return needed_layers(build_layer_list(settings.model, teacher_build), teacher_build.outputs)


def with_outputs(build: ModelBuild, outputs: Sequence[str]) -> ModelBuild:
    """Return the build of a model with further outputs."""
    return replace(build, outputs=tuple(dict.fromkeys([*build.outputs, *outputs])))


def build_model(model: ModelSection, build: ModelBuild, seed: int | None = None) -> LayerSequence:
    """Build the model as one module; with `seed` its parameters get their initial values."""
    module = LayerSequence(build_layer_list(model, build), build.outputs, build.parallel.dropout)
    if seed is not None:
        initialize_parameters(module, seed)
    return module


def plain_model(model: ModelSection, outputs: Sequence[str], device: str) -> LayerSequence:
    """Build the complete model with the default kernels, its parameters unset, in evaluation mode.

    Raises:
        ConfigError: as build_layer_list.
    """
    kernels = KernelSet(KernelsConfig(), device, torch.float32)
    with torch.device(device):
        return build_model(model, ModelBuild(tuple(outputs), kernels)).eval()


@dataclass(frozen=True)
class WholeModel:
    """Facts and shapes of the complete model's parameters."""

    shapes: dict[str, tuple[int, ...]]
    facts: dict[str, ParameterFacts]

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained parameters."""
        return {name: shape for name, shape in self.shapes.items() if self.facts[name].trained}

    def initial_value(self, name: str, seed: int) -> torch.Tensor:
        """Return the complete initial value of a parameter."""
        return initial_value(name, self.shapes[name], self.facts[name].init, seed)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; a tied one counts once."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


def describe_model(model: ModelSection, outputs: Sequence[str]) -> WholeModel:
    """Build the complete model on the `meta` device and return its parameters.

    Raises:
        ConfigError: as build_layer_list.
    """
    kernels = KernelSet(KernelsConfig(), "cpu", torch.float32)
    return describe_layers(build_layer_list(model, ModelBuild(tuple(outputs), kernels)), outputs)


def block_names(model: ModelSection, outputs: Sequence[str]) -> list[str]:
    """Return the prefix of the parameters of each repeated layer, in order.

    Raises:
        ConfigError: as build_layer_list.
    """
    kernels = KernelSet(KernelsConfig(), "cpu", torch.float32)
    layers = build_layer_list(model, ModelBuild(tuple(outputs), kernels))
    prefixes = parameter_prefixes(layers)
    return [prefix for prefix, layer in zip(prefixes, layers, strict=True) if layer.block]


def describe_layers(layers: Sequence[LayerDescription], outputs: Sequence[str]) -> WholeModel:
    """Return the parameters of a list of layers of the complete model."""
    with torch.device("meta"):
        module: Any = LayerSequence(layers, outputs)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return WholeModel(shapes, collect_facts(module))


def vocabulary_table(model: ModelSection, outputs: Sequence[str]) -> str:
    """Return the name of the parameter that has a row for each word; vocab_size may be unset."""
    whole = describe_model(model.model_copy(update={"vocab_size": model.vocab_size or 1}), outputs)
    tables = (name for name, facts in whole.facts.items() if facts.grows == "vocabulary" and facts.trained)
    return max(tables, key=lambda name: len(whole.shapes[name]))

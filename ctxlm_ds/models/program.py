"""A model as a program: the list of its layers, rewritten by a fixed sequence of passes and built once.

A family lists its layers. Each of PASSES returns the list with what the objective, the teacher or a kernel adds. With
losses inside decoders, a layer that writes logits becomes one that compares them with labels some rows at a time: the
labels are a tensor of the list like any other, so they reach the last stage of a pipeline, and the weight is used
inside the layer that owns it, as ZeRO-3 and tied embeddings need (parallel/cross_entropy.py).
Engine, planner, export and checkpoints read the finished Program: layers, loss terms, outputs, and the facts and shapes
of the complete model's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
from ctxlm_ds.models.layers import LayerDescription, LayerSequence, ModelBuild, parameter_prefixes
from ctxlm_ds.models.parts.comparison import Comparison, with_comparisons
from ctxlm_ds.models.parts.distillation import is_tap, needed_layers, teacher_layers, together, with_taps
from ctxlm_ds.models.parts.width import with_width
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.layers import VocabParallelEmbedding, VocabularyBias
from ctxlm_ds.parallel.parameters import ParameterFacts, collect_facts, initial_value, initialize_parameters
from ctxlm_ds.recipe.schema import TeacherConfig
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.registry import FAMILIES, load_object

if TYPE_CHECKING:
    from ctxlm_ds.objectives.base import Objective


def loss_of(logits: str, z_loss: float = 0.0) -> tuple[str, ...]:
    """Return the names of the tensors that replace logits: sum of the losses, right predictions, sum of any z_loss."""
    return f"{logits}.loss_sum", f"{logits}.correct", *((f"{logits}.squares",) if z_loss else ())


def _given_losses(
    terms: Sequence[Any], outputs: Sequence[str], layers: Sequence[LayerDescription], z_loss: float
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return loss terms and outputs in which losses that `layers` write take the place of logits."""
    written = {name for layer in layers for name in layer.writes}
    losses = {term.outputs[0]: loss_of(term.outputs[0], z_loss) for term in terms}
    given = {logits: names for logits, names in losses.items() if written.issuperset(names)}
    changed = (term.given(given[term.outputs[0]]) if term.outputs[0] in given else term for term in terms)
    return tuple(changed), tuple(new for name in outputs for new in given.get(name, (name,)))


def _decoder(
    layers: Sequence[LayerDescription], logits: str
) -> tuple[LayerDescription, LayerDescription | None] | None:
    """Return the decoder that writes logits, and the layer after it that adds a bias; None if others read them."""
    writers = {name: index for index, layer in enumerate(layers) for name in layer.writes}
    readers = [name for layer in layers for name in layer.reads]
    index = writers.get(logits)
    if index is None or logits in readers:
        return None
    last, bias = layers[index], None
    if last.factory is VocabularyBias and writers.get(last.reads[0]) == index - 1 and readers.count(last.reads[0]) == 1:
        last, bias = layers[index - 1], last
    is_table = getattr(last.factory, "forward", None) is VocabParallelEmbedding.forward
    return (last, bias) if is_table and "decode" in last.call_kwargs and not last.frozen else None


@dataclass(frozen=True)
class Source:
    """What the passes read."""

    model: ModelSection
    build: ModelBuild
    """Its outputs include the tensors that comparisons read."""
    teacher: TeacherConfig | None = None
    teacher_build: ModelBuild | None = None
    """None if no teacher's layers join the list."""
    comparisons: tuple[Comparison, ...] = ()
    labels: Mapping[str, str | None] = field(default_factory=dict)
    """Logits that a loss term compares with words -> labels; None if something else also reads the logits."""
    z_loss: float = 0.0
    """Its weight relative to the loss of words."""

    def complete(self) -> Source:
        """Return the source of the complete model, as one rank without others holds it."""
        alone, theirs = ParallelContext(), self.teacher_build
        theirs = theirs and replace(theirs, parallel=alone)
        return replace(self, build=replace(self.build, parallel=alone), teacher_build=theirs)


def _list_family(model: ModelSection, build: ModelBuild) -> list[LayerDescription]:
    """List a family's layers with the taps among the outputs; ConfigError if the shape or an output is impossible."""
    if model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set: give it in the recipe or take the tokenizer's size")
    problem = next(chain(model.problems(), model.tensor_parallel_problems(build.parallel.size)), None)
    if problem is not None:
        raise ConfigError(f"{problem.path}: {problem.text}")
    family = FAMILIES.get(model.family)
    taps = [name for name in build.outputs if is_tap(name)]
    missing = [name for name in build.outputs if name not in family.outputs and name not in taps]
    if missing:
        raise ConfigError(f"model.family {model.family} cannot compute {', '.join(missing)} that the objective needs")
    return with_taps(load_object(family.layers, f"the layers of model.family {model.family}")(model, build), taps)


def _join_teacher(layers: list[LayerDescription], source: Source) -> list[LayerDescription]:
    teacher, build = source.teacher, source.teacher_build
    if teacher is None or teacher.model is None or build is None:
        return layers
    theirs = needed_layers(_list_family(teacher.model, build), build.outputs)
    dtype = None if teacher.precision == "run" else DTYPES[teacher.precision]
    return together(layers, teacher_layers(theirs, dtype), last=teacher.placement == "last")


def _compute_losses(layers: list[LayerDescription], source: Source) -> list[LayerDescription]:
    """Replace the layers that write logits by one that writes their loss, if the kernel of `cross_entropy` does that.

    Raises ConfigError if the recipe names a kernel that needs this, and a layer or a term needs the logits.
    """
    kernels, replaced = source.build.kernels, list(layers)
    asked = kernels.asked("cross_entropy")
    for logits, name in source.labels.items():
        found = _decoder(layers, logits) if name is not None else None
        if found is None and asked not in ("auto", "full"):
            raise ConfigError(
                f"kernels.cross_entropy: `{asked}` never holds {logits}, but another layer or loss term of this run or "
                "evaluation.continuations or evaluation.prompts reads them; set it to `auto` or `full`"
            )
        if found is None or kernels.cross_entropy is None:
            continue
        decode, bias = found
        start = replaced.index(decode)
        reads = (*decode.reads, str(name))
        new = []
        if bias is not None:
            reads = (*reads, f"{logits}.bias")
            new.append(replace(bias, reads=(), writes=(reads[-1],)))
        writes = loss_of(logits, source.z_loss)
        call = {**decode.call_kwargs, **({"z_loss": source.z_loss} if source.z_loss else {})}
        new.append(replace(decode, reads=reads, writes=writes, no_gradient=frozenset(writes[1:]), call_kwargs=call))
        replaced[start : start + len(new)] = new
    return replaced


PASSES: tuple[Callable[[list[LayerDescription], Source], list[LayerDescription]], ...] = (
    _join_teacher,
    lambda layers, source: with_comparisons(layers, source.comparisons, source.build),
    _compute_losses,
)
"""Each takes the list of layers and returns it rewritten, in this order."""


def _list_layers(source: Source) -> list[LayerDescription]:
    layers = _list_family(source.model, source.build)
    for rewrite in PASSES:
        layers = rewrite(layers, source)
    return layers


@dataclass(frozen=True, eq=False)
class Program:
    """A finished list of layers, and what others ask about it."""

    layers: list[LayerDescription]
    """In order, for this rank's share of every layer."""
    outputs: tuple[str, ...]
    """Tensors that the loss terms read."""
    terms: tuple[Any, ...] = ()
    """The objective's loss terms (objectives/base.py); a loss that a layer computes has taken the place of logits."""
    parallel: ParallelContext = field(default_factory=ParallelContext)
    complete_layers: list[LayerDescription] | None = None
    """The layers of the complete model if a rank holds a share of it."""
    model: ModelSection | None = None
    """Settings by whose width parameters begin and learn (models/parts/width.py); None for as the layers say."""

    @cached_property
    def _parameters(self) -> tuple[dict[str, tuple[int, ...]], dict[str, ParameterFacts]]:
        """Build the complete model on the `meta` device; return shapes and facts of its parameters by name."""
        with torch.device("meta"):
            module = LayerSequence(self.complete_layers or self.layers, self.outputs)
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        return shapes, collect_facts(module) if self.model is None else with_width(collect_facts(module), self.model)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the complete model's parameters."""
        return self._parameters[0]

    @property
    def facts(self) -> dict[str, ParameterFacts]:
        """What modules declare about the complete model's parameters."""
        return self._parameters[1]

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.shapes.items() if self.facts[name].trained}

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; a tied one counts once."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def vocabulary_table(self) -> str:
        """Name of the parameter that has a row for each word."""
        tables = (name for name, facts in self.facts.items() if facts.grows == "vocabulary" and facts.trained)
        return max(tables, key=lambda name: len(self.shapes[name]))

    @property
    def block_names(self) -> list[str]:
        """Prefix of the parameters of each repeated layer, in order."""
        prefixes = zip(parameter_prefixes(self.layers), self.layers, strict=True)
        return [prefix for prefix, layer in prefixes if layer.block]

    def initial_value(self, name: str, seed: int) -> torch.Tensor:
        return initial_value(name, self.shapes[name], self.facts[name].init, seed)

    def module(self, seed: int | None = None) -> LayerSequence:
        """Build the layers as one module; with `seed` its parameters get their initial values."""
        module = LayerSequence(self.layers, self.outputs, self.parallel.dropout)
        if seed is not None:
            initialize_parameters(module, seed, self.facts)
        return module


def build_program(
    model: ModelSection,
    build: ModelBuild,
    objective: Objective | None = None,
    teacher: TeacherConfig | None = None,
    kernels_of: Callable[[str], KernelSet] | None = None,
    read_logits: Sequence[str] = (),
    fields: Sequence[str] | None = None,
) -> Program:
    """List the layers of a model or of a complete run.

    `model` has a vocab_size. `objective` adds its teacher, comparisons and losses; None is a model alone. Without
    settings of a model in `teacher` the teacher is left out. `kernels_of` chooses kernels for a precision, which may
    differ for the teacher; None takes those of `build`. `read_logits` are logits that something outside the list reads,
    `fields` those of a batch; None leaves open what layers and terms may read.

    Raises ConfigError if a shape is impossible, a family has no head for an output, a kernel does not go with the
    layers, an object cannot be imported, or nothing writes a tensor that is read.
    """
    source, outputs = Source(model, build), build.outputs
    terms: tuple[Any, ...] = ()
    if objective is not None:
        labels = objective.word_labels | dict.fromkeys(read_logits)
        source, terms = replace(source, labels=labels, z_loss=objective.z_loss), objective.terms
        if objective.teacher_outputs and teacher is not None and teacher.model is not None:
            source, outputs = _with_teacher(source, objective, teacher, teacher.model, kernels_of), objective.tensors
    layers = _list_layers(source)
    is_complete = (build.parallel.size, build.parallel.vocab_multiple) == (1, 1)
    complete = None if is_complete else _list_layers(source.complete())
    terms, outputs = _given_losses(terms, outputs, layers, source.z_loss)
    program = Program(layers, outputs, terms, build.parallel, complete, model)
    if objective is not None and fields is not None:
        # Without settings of the teacher, its tensors are unknown.
        judged = terms if source.teacher is not None or not objective.teacher_outputs else ()
        readers = {f"loss term {term.name}": (*term.outputs, *term.labels) for term in judged}
        missing = _missing(program, readers | {"evaluation": tuple(read_logits)}, fields)
        if missing:
            raise ConfigError(
                f"model.family {model.family} with objective.name {objective.name}: {', '.join(missing)}, but no layer "
                f"before it writes that, and it is no field of the batch ({', '.join(fields)}) and no output "
                f"({', '.join(outputs)}); correct reads, writes or fields"
            )
        for term in terms:
            load_object(term.reduce, f"the reduction of loss term {term.name}")
    return program


def _missing(program: Program, readers: Mapping[str, Sequence[str]], fields: Sequence[str]) -> list[str]:
    """Return who reads what nothing gives: layers, and readers of outputs and fields."""
    known, missing = set(fields), []
    for layer in program.layers:
        missing += [f"layer {layer.name} reads {name}" for name in layer.needs() if name not in known]
        known.update(layer.gives())
    missing += [f"the objective reads {name}" for name in program.outputs if name not in known]
    known = {*fields, *program.outputs}
    return missing + [f"{reader} reads {name}" for reader in readers for name in readers[reader] if name not in known]


def _with_teacher(
    source: Source,
    objective: Objective,
    settings: TeacherConfig,
    teacher: ModelSection,
    kernels_of: Callable[[str], KernelSet] | None,
) -> Source:
    comparisons = tuple(objective.comparisons(source.model, teacher))
    is_other = settings.precision != "run"
    kernels = kernels_of(settings.precision) if is_other and kernels_of is not None else source.build.kernels
    theirs = replace(source.build, outputs=objective.teacher_outputs, kernels=kernels, recompute=False)
    return replace(
        source,
        build=source.build.with_outputs([comparison.student for comparison in comparisons]),
        teacher=settings,
        teacher_build=theirs.with_outputs([comparison.teacher for comparison in comparisons]),
        comparisons=comparisons,
    )


def plain_program(model: ModelSection, outputs: Sequence[str]) -> Program:
    """List the layers of the complete model with the default kernels of a CPU; errors are those of build_program."""
    return build_program(model, ModelBuild(tuple(outputs), KernelSet({}, "cpu", torch.float32)))

"""Weights for a new run from a checkpoint of this project or a Hugging Face folder (`initialize_from`).

Additional rows of a larger vocabulary or position table, and heads that the source lacks, keep their initial values and
moments of 0 (`initialize_moments`); any other difference is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from ctxlm_ds.checkpoint.chunk_index import WEIGHT_KIND
from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError, TokenizerError
from ctxlm_ds.export.base import own_format_in
from ctxlm_ds.export.key_maps import Shape, WeightSource
from ctxlm_ds.export.weights import HuggingFaceWeights, check_finite, is_checkpoint, open_checkpoint
from ctxlm_ds.models.program import Program, plain_program
from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.recipe.sections import EMA_KIND, ModelSection
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer


def load_initial_weights(
    path: str | Path,
    model: ModelSection,
    outputs: Sequence[str],
    fresh: Callable[[str], torch.Tensor],
    layers: Sequence[int] | Literal["spread"] | None = None,
    compares: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter of the new model, which has vocab_size set, with its fp32 value, one at a time.

    `path` is a run, a checkpoint, an imported folder (from-hf), or a Hugging Face folder with safetensors. `fresh`
    returns a parameter's initial value, for rows and heads that the source lacks. `layers` takes some of the source's
    layers (select_layers); it may then be of another family and have further parameters. Without `compares` settings
    that change what the model computes may differ, as between two phases.

    Raises CheckpointError with every difference, before the first value, or if a tensor has a NaN, ExportError if the
    Hugging Face folder cannot be read.
    """
    folder = Path(path)
    source, source_model, theirs = _open(folder)
    whole = plain_program(model, outputs)
    names = {name: name for name in source.names()}
    if layers is not None:
        names = select_layers(theirs, whole, list(names), layers)
    found = {ours: source.shape(there) for ours, there in names.items()}
    # Optional heads that only one side has are allowed.
    theirs = theirs if found.keys() - whole.facts.keys() else whole
    problems = [
        f"model.{key} is {getattr(source_model, key)!r} there, {getattr(model, key)!r} here"
        for key in model.same_function
        if compares
        and (layers is None or key != "family")
        and hasattr(source_model, key)
        and getattr(source_model, key) != getattr(model, key)
    ]
    problems += _parameters_that_differ(theirs, found, whole)
    if problems:
        raise CheckpointError(
            f"initialize_from: {folder} does not fit the recipe's model: "
            + "; ".join(problems)
            + ". Give the recipe the model section of that folder's config"
        )
    left_out = [name for name in found if name not in whole.shapes]
    if left_out:
        logger.info("initialize_from: not needed by this objective: %s", ", ".join(left_out))
    return _values(source, names, whole, fresh, folder)


def warn_of_other_tokens(path: str | Path, tokenizer: Tokenizer) -> None:
    """Log a warning if the source has a tokenizer with other tokens: rows of its embeddings are taken by number."""
    folder = Path(path) / "tokenizer"
    try:
        theirs = load_tokenizer(folder if folder.is_dir() else path)
    except TokenizerError:
        return
    both = range(min(theirs.vocab_size, tokenizer.vocab_size))
    other = [at for at in both if theirs.id_to_token(at) != tokenizer.id_to_token(at)]
    if other:
        logger.warning(
            "initialize_from: the tokenizer of %s has other tokens at %d of %d ids (%d: %r there, %r here), whose "
            "embeddings start as those of other words; set tokenizer.path to that one to continue the model",
            path, len(other), len(both), other[0], theirs.id_to_token(other[0]), tokenizer.id_to_token(other[0]),
        )  # fmt: skip


def load_initial_moments(
    path: str | Path, optimizer: str, model: Program
) -> dict[str, Iterator[tuple[str, torch.Tensor]]]:
    """Return the moments of every parameter of the new model by kind, one parameter at a time, as `path` has them.

    `path` is a run or a checkpoint, whose weights load_initial_weights accepted. Raises CheckpointError if it has no
    moments, those of another optimizer, damaged ones, or a NaN in them.
    """
    folder = Path(path)
    checkpoint = open_checkpoint(folder, with_moments=True) if is_checkpoint(folder) else None
    kinds = checkpoint.reader.moment_kinds() if checkpoint else []
    if checkpoint is None or not kinds:
        raise CheckpointError(
            f"initialize_moments: {folder} has no optimizer's moments; name a run or checkpoint that has trained in "
            "initialize_from, or set initialize_moments to false"
        )
    theirs = checkpoint.config.optimizer.name
    if theirs != optimizer:
        raise CheckpointError(
            f"initialize_moments: the moments of {folder} are of optimizer.name {theirs}, but the recipe has "
            f"{optimizer}; set the same, or initialize_moments to false"
        )
    reader = checkpoint.reader
    if any(name not in reader or reader.shape(name) != shape for name, shape in model.trained_shapes.items()):
        kinds = [kind for kind in kinds if kind != EMA_KIND]  # that of new rows and heads is not known: it begins again

    def values(kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in model.trained_shapes.items():
            value = torch.zeros(shape)
            # The average of a parameter that was not trained is its weight.
            own = reader.kinds(name) if name in reader else []
            found = kind if kind in own or kind != EMA_KIND else WEIGHT_KIND
            if found in own:
                value = _extend(check_finite(f"{name} ({kind})", reader.read_full(name, found), folder), value)
            yield name, value

    return {kind: values(kind) for kind in kinds}


def _open(folder: Path) -> tuple[WeightSource, ModelSection, Program]:
    if not folder.is_dir():
        raise CheckpointError(
            f"initialize_from: {folder} is not a folder; give a run, a checkpoint or a local Hugging Face model folder "
            "(download a model of the Hub there first)"
        )
    if is_checkpoint(folder):
        checkpoint = open_checkpoint(folder)
        return checkpoint.reader, checkpoint.model, checkpoint.program
    own = own_format_in(folder)
    if own is not None:
        opened = own.open(folder)
        return opened.source, opened.model, plain_program(opened.model, opened.outputs)
    weights = HuggingFaceWeights(folder, with_heads=True)
    return weights, weights.model, weights.program


def _parameters_that_differ(theirs: Program, found: dict[str, Shape], whole: Program) -> Iterator[str]:
    for name, facts in whole.facts.items():
        if name not in found and not facts.optional:
            yield f"{name} is missing there"
    for name in found:
        if name not in whole.facts and (name not in theirs.facts or not theirs.facts[name].optional):
            yield f"{name} is unknown here"
    for name, shape in whole.shapes.items():
        there = found.get(name, shape)
        extends = whole.facts[name].grows is not None and there[1:] == shape[1:] and there[0] < shape[0]
        if there != shape and not extends:
            yield f"{name} has shape {there} there, {shape} here"


def _values(
    source: WeightSource, names: Mapping[str, str], whole: Program, fresh: Callable[[str], torch.Tensor], folder: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in whole.shapes.items():
        if name not in names:
            logger.info("initialize_from: %s is missing there and keeps its initial value", name)
            yield name, fresh(name)
            continue
        value = check_finite(name, source.read_full(names[name]), f"initialize_from: {folder}")
        if tuple(value.shape) != shape:
            logger.info("initialize_from: %s of %s, extended from %d to %d rows",
                        whole.facts[name].grows, name, value.shape[0], shape[0])  # fmt: skip
            value = _extend(value, fresh(name), whole.facts[name])
        yield name, value


def _extend(value: torch.Tensor, fresh: torch.Tensor, facts: ParameterFacts | None = None) -> torch.Tensor:
    """Return the value in the shape of `fresh`, which gives the additional rows.

    Those of a position table are copies of its positions from the first on, again and again, so that near positions
    differ as before (Beltagy 2020, Longformer, arXiv:2004.05150, section 5).
    """
    more = fresh.shape[0] - value.shape[0]
    if not more:
        return value
    if facts is not None and facts.grows == "position table":
        positions = value[facts.unused_rows :]
        fresh = torch.cat((value, positions.repeat(-(-more // len(positions)), 1)))[: len(fresh)]
    return torch.cat((value, fresh[value.shape[0] :]))


def select_layers(
    there: Program, here: Program, names: Sequence[str], layers: Sequence[int] | Literal["spread"]
) -> dict[str, str]:
    """Return the names in a larger model, which has `names`, of the parameters of another one, by the names here.

    `layers` are numbers of its repeated layers, from 0; `spread` takes the first, the last and equal steps between.
    Raises CheckpointError if the numbers do not fit the models.
    """
    count, wanted = len(there.block_names), len(here.block_names)
    numbers = spread(count, wanted) if layers == "spread" else list(layers)
    if len(numbers) != wanted:
        raise CheckpointError(f"initialize_layers: {numbers} has {len(numbers)} layers, but the model has {wanted}")
    if max(numbers) >= count:
        raise CheckpointError(f"initialize_layers: {max(numbers)} is not one of the source's layers 0 to {count - 1}")
    logger.info("initialize_from: layers %s of %d", ", ".join(map(str, numbers)), count)
    prefixes = tuple(f"{block}." for block in there.block_names)
    found = {name: name for name in names if not name.startswith(prefixes)}
    for block, number in zip(here.block_names, numbers, strict=True):
        for name in (name for name in names if name.startswith(prefixes[number])):
            found.setdefault(f"{block}.{name.removeprefix(prefixes[number])}", name)
    return {ours: theirs for ours, theirs in found.items() if ours in here.shapes}


def spread(count: int, wanted: int) -> list[int]:
    """Return `wanted` of `count` numbers, from the first to the last in equal steps: 0 2 4 7 9 11 for 6 of 12.

    Source: scripts/extract_distilbert.py of transformers' research projects (distillation).
    """
    if wanted == 1:
        return [0]
    return [int(index * (count - 1) / (wanted - 1) + 0.5) for index in range(wanted)]

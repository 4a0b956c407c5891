"""Weights for a new run from a checkpoint of this project or a Hugging Face folder (`initialize_from`).

In: the folder and the new model's shape. Out: its parameters one at a time. A larger vocabulary or position table keeps
its fresh rows, heads that the source lacks stay fresh; anything else that differs is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.export.checkpoint_source import is_checkpoint, open_checkpoint
from ctxlm_ds.export.key_maps import Shape
from ctxlm_ds.export.weights import HuggingFaceWeights, WeightSource, model_shapes
from ctxlm_ds.families.base import TransformerSection

EXTENDABLE = {
    "word_embeddings.weight": "vocabulary",
    "mlm_bias.bias": "vocabulary",
    "embeddings.position_embeddings.weight": "position table",
}
"""Parameters whose first rows may come from a smaller model."""
OBJECTIVE_HEADS = ("heads.pooler.", "heads.nsp_classifier.")
"""Parameters that the objective decides: fresh where the source lacks them, left out where the new model does."""
# What changes the function without changing any shape.
SAME_SETTINGS = ("family", "num_attention_heads", "hidden_activation", "layer_norm_eps", "pre_layer_norm")


def load_initial_weights(
    path: str | Path,
    model: TransformerSection,
    terms: Sequence[str],
    fresh: Callable[[str], torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the new model with its fp32 value, one at a time.

    Args:
        path: a run, a checkpoint, an imported folder (from-hf), or a Hugging Face folder with safetensors.
        model: the new model, vocab_size set.
        terms: the new objective's loss terms, which decide its heads.
        fresh: gives a parameter's own initial value, for rows and heads that the source lacks.

    Raises:
        CheckpointError: the source does not fit; lists every difference. Raised before the first value.
        ExportError: a Hugging Face folder that cannot be read.
    """
    folder = Path(path)
    source, source_model = _open(folder)
    expected = model_shapes(model, terms)
    _check_fit(folder, source, source_model, model, expected)
    return _values(source, expected, fresh)


def _open(folder: Path) -> tuple[WeightSource, TransformerSection]:
    if not folder.is_dir():
        raise CheckpointError(
            f"initialize_from: {folder} is no folder; give a run, a checkpoint or a local Hugging Face model folder "
            "(download a model of the Hub there first)"
        )
    if is_checkpoint(folder):
        checkpoint = open_checkpoint(folder)
        return checkpoint.reader, checkpoint.model
    weights = HuggingFaceWeights(folder)
    return weights, weights.model


def _check_fit(
    folder: Path,
    source: WeightSource,
    source_model: TransformerSection,
    model: TransformerSection,
    expected: dict[str, Shape],
) -> None:
    found = {name: source.shape(name) for name in source.names()}
    problems = [
        f"model.{key} is {getattr(source_model, key)!r} there, {getattr(model, key)!r} here"
        for key in SAME_SETTINGS
        if getattr(source_model, key) != getattr(model, key)
    ]
    problems += [f"{name} is missing there" for name in expected if name not in found and not _is_head(name)]
    problems += [f"{name} is unknown here" for name in found if name not in expected and not _is_head(name)]
    problems += [
        f"{name} has shape {found[name]} there, {shape} here"
        for name, shape in expected.items()
        if name in found and not _fits(name, found[name], shape)
    ]
    if problems:
        raise CheckpointError(
            f"initialize_from: {folder} does not fit the recipe's model: " + "; ".join(problems)
            + ". Give the recipe the model section of that folder's config"
        )
    left_out = [name for name in found if name not in expected]
    if left_out:
        logger.info("initialize_from: not needed by this objective: %s", ", ".join(left_out))


def _is_head(name: str) -> bool:
    return name.startswith(OBJECTIVE_HEADS)


def _fits(name: str, found: Shape, shape: Shape) -> bool:
    """Equal, or an extendable parameter with fewer rows there."""
    return found == shape or (name in EXTENDABLE and found[1:] == shape[1:] and found[0] < shape[0])


def _values(
    source: WeightSource, expected: dict[str, Shape], fresh: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    available = set(source.names())
    for name, shape in expected.items():
        if name not in available:
            logger.info("initialize_from: %s is not there and keeps its fresh value", name)
            yield name, fresh(name)
            continue
        value = source.read_full(name)
        if tuple(value.shape) != shape:
            logger.info("initialize_from: %s of %s, extended from %d to %d rows",
                        EXTENDABLE[name], name, value.shape[0], shape[0])  # fmt: skip
            extended = fresh(name).clone()
            extended[: value.shape[0]] = value
            value = extended
        yield name, value

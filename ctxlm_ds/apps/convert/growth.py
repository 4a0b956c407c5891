"""Grow a model: more layers repeat those of the source, wider ones tile its weights from the middle.

This is how ModernBERT-large began from ModernBERT-base (Warner 2024, arXiv:2412.13663, section 2.2.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.apps.convert.vocabulary import write_model
from ctxlm_ds.checkpoint.folders import check_output
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.export.weights import FRESH_SEED, check_finite, open_checkpoint
from ctxlm_ds.models.program import Program, plain_program
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.tokenizers.load import load_tokenizer

HEADS = "num_attention_heads"
SIZES = ("layers", "heads", "size", "groups")
Axis = tuple[tuple[int, ...], tuple[int, ...]]
"""Parts of the source's and of the grown dimension, the outer first: heads of keys, queries of each, elements."""


def grow(checkpoint: Path, settings: Sequence[str], output: Path) -> list[str]:
    """Write the weights of a checkpoint for a larger model of its family; return lines to print.

    `settings` are sizes, such as `model.num_layers=28`. Layer i of n is the source's layer round(i m / n) of m. A
    parameter that the source's layer lacks has its initial value.

    Raises:
        ConfigError: a setting is no size, is smaller, or is refused by the model's own checks.
        CheckpointError: the source is missing or damaged, or `output` exists.
    """
    check_output(output, checkpoint)
    source = open_checkpoint(checkpoint)
    config = load_config(source.folder / "config.yaml", settings)
    model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or source.model.vocab_size})
    _check_settings(source.model, model, settings)
    program, axes = plain_program(model, source.outputs), list(_head_axes(source.model, model))
    names = source_names(source.program, program)

    def read(name: str) -> torch.Tensor:
        if (there := names[name]) not in source.reader:
            return program.initial_value(name, FRESH_SEED)
        value = check_finite(there, source.reader.read_full(there), source.folder)
        splits = (source.program.facts[there].split, program.facts[name].split)
        return tiled(value, program.shapes[name], axes, [split.blocks if split else () for split in splits])

    tokenizer = load_tokenizer(source.folder / "tokenizer")
    written = write_model(output, source, model, tokenizer, program, read)
    return [f"{source.program.num_parameters:,} parameters became {program.num_parameters:,}", *written]


def _check_settings(old: ModelSection, new: ModelSection, settings: Sequence[str]) -> None:
    """Raise ConfigError unless only sizes of a transformer's layers differ, and each has grown."""
    changed = [(name, getattr(old, name, None), now) for name, now in new if getattr(old, name, None) != now]
    wrong = [setting for setting in settings if not setting.startswith("model.")]
    sizes = [name for name, _, _ in changed if name.endswith(SIZES) and not name.endswith("vocab_size")]
    wrong += [f"model.{name}={now} ({before} before)" for name, before, now in changed
              if name not in sizes or not before or not now or now < before]  # fmt: skip
    if wrong or not changed or not hasattr(old, HEADS):
        text = ", ".join(wrong) or f"nothing of model.family {old.family}"
        raise ConfigError(f"{text}: sizes of a transformer's layers may grow, such as --set model.num_layers=28")


def _head_axes(old: ModelSection, new: ModelSection) -> Iterator[Axis]:
    """Yield the dimensions of queries, and of keys and values; raise ConfigError if heads have another size."""
    for prefix in (name.removesuffix(HEADS) for name in type(old).model_fields if name.endswith(HEADS)):
        (queries, keys, size), (more, more_keys, now) = (_heads(model, prefix) for model in (old, new))
        if size != now:
            text = f"{more} makes heads of {now} elements, but they stay complete, of {size}; set more or fewer"
            raise ConfigError(f"model.{prefix}{HEADS}: {text}")
        yield (keys, queries // keys, size), (more_keys, more // more_keys, size)
        yield (keys, size), (more_keys, size)


def _heads(model: Any, prefix: str) -> tuple[int, int, int]:
    """Return the heads of queries, those of keys, and the size of a head."""
    heads: int = getattr(model, f"{prefix}{HEADS}")
    size = getattr(model, "head_size", None) or getattr(model, f"{prefix}hidden_size") // heads
    return heads, getattr(model, f"{prefix}num_key_value_heads", None) or heads, size


def source_names(old: Program, new: Program) -> dict[str, str]:
    """Return the source's name of each parameter; layers of each stack are repeated as Gopher's (Rae 2021).

    Source: init_model_from_pretrained of AnswerDotAI/ModernBERT, src/bert_layers/model.py; it has no bound.
    """
    there, here = (Counter(block.rpartition(".")[0] for block in set(each.block_names)) for each in (old, new))
    names = {name: name for name in new.shapes}
    for name in names:
        if block := next((block for block in new.block_names if name.startswith(f"{block}.")), None):
            stack, _, number = block.rpartition(".")
            at = min(round(int(number) * there[stack] / here[stack]), there[stack] - 1)
            names[name] = f"{stack}.{at}{name.removeprefix(block)}"
    return names


def tiled(
    value: torch.Tensor, shape: Sequence[int], axes: Sequence[Axis] = (), blocks: Sequence[Sequence[int]] = ((), ())
) -> torch.Tensor:
    """Return a parameter with a larger `shape`, tiled from the middle; `blocks` of rows, old and new, on their own.

    Source: tile_weight (tile_weights_from_middle) of AnswerDotAI/ModernBERT, src/bert_layers/initialization.py.
    """
    for dim, size in enumerate(shape):
        before, after = blocks if dim == 0 and blocks[0] else ([value.shape[dim]], [size])
        parts = zip(value.split(list(before), dim), before, after, strict=True)
        value = torch.cat([part.index_select(dim, places(old, new, axes)) for part, old, new in parts], dim)
    return value


def places(old: int, new: int, axes: Sequence[Axis] = ()) -> torch.Tensor:
    """Return the index in a dimension of `old` elements of each of `new`; the same for every dimension of both sizes.

    Dimensions of attention heads are tiled by heads, and by the queries of each head of keys.
    """
    parts = next((axis for axis in axes if (prod(axis[0]), prod(axis[1])) == (old, new)), ((old,), (new,)))
    found = torch.zeros(1, dtype=torch.long)
    for before, after in zip(*parts, strict=True):
        wrapped = (torch.arange(after) - (after - before) // 2) % before
        found = (found[:, None] * before + wrapped).flatten()
    return found

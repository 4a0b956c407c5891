"""Losses inside decoders: the layers that write logits become one that compares them with labels some rows at a time.

The labels are a tensor of the list like any other, so they reach the last stage of a pipeline, and the weight is used
inside the layer that owns it, as ZeRO-3 and tied embeddings need (parallel/linear_cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.embeddings import VocabularyBias, WordEmbeddings


def loss_of(logits: str) -> tuple[str, str]:
    """Return the names of the tensors that replace logits: the sum of the losses, and the right predictions."""
    return f"{logits}.loss_sum", f"{logits}.correct"


def with_decoder_losses(
    layers: Sequence[LayerDescription], labels: Mapping[str, str | None], kernels: KernelSet
) -> list[LayerDescription]:
    """Replace the layers that write logits by one that writes their loss, if the kernel of `cross_entropy` does that.

    Args:
        layers: those of a run.
        labels: logits that a loss term compares with words -> labels; None if another term also reads the logits.
        kernels: kernels of the run.

    Raises:
        ConfigError: the recipe names a kernel that needs this, and a layer or a term needs the logits.
    """
    replaced, asked = list(layers), kernels.asked("cross_entropy")
    for logits, name in labels.items():
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
        new.append(replace(decode, reads=reads, writes=loss_of(logits), no_gradient=frozenset(loss_of(logits)[1:])))
        replaced[start : start + len(new)] = new
    return replaced


def given_losses(
    terms: Sequence[Any], outputs: Sequence[str], layers: Sequence[LayerDescription]
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return loss terms and outputs in which losses that `layers` write take the place of logits.

    Args:
        terms: loss terms of the objective (LossTerm).
        outputs: tensors that the terms read.
        layers: layers of the run.
    """
    written = {name for layer in layers for name in layer.writes}
    losses = {term.outputs[0]: loss_of(term.outputs[0]) for term in terms}
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
    is_decoder = getattr(last.factory, "forward", None) is WordEmbeddings.forward and "decode" in last.call_kwargs
    return (last, bias) if is_decoder and not last.frozen else None

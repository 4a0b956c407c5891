"""Counts by formula, without building the model: parameters and floating-point operations.

Shape letters: s positions of a row, p prediction slots, m sequences of a row, h width, f feed-forward width,
v vocabulary. A multiplication and the addition after it count as two operations.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctxlm_ds.families.base import TransformerSection

BACKWARD_FACTOR = 2
"""The backward pass multiplies twice for each product of the forward pass."""


def parameter_count(config: TransformerSection, terms: Sequence[str]) -> int:
    """Parameters of the model, the tied word embedding once."""
    h, f, v = config.hidden_size, config.intermediate_size, _vocab_size(config)
    num_types = config.type_vocab_size if config.family == "bert" else 0
    embeddings = (v + config.max_position_embeddings + config.position_offset + num_types) * h
    layer = (3 * h * h + 3 * h) + (h * h + h) + (h * f + f) + (f * h + h) + 4 * h
    final_norm = 2 * h if config.pre_layer_norm else 0
    body = embeddings + config.num_layers * layer + final_norm
    if config.is_decoder:
        return body
    embeddings_norm = 2 * h
    masked_lm = (h * h + h) + 2 * h + v
    next_sentence = (h * h + h) + (2 * h + 2) if "next_sentence" in terms else 0
    return body + embeddings_norm + masked_lm + next_sentence


def forward_flops_per_row(
    config: TransformerSection, terms: Sequence[str], seq_length: int, num_predictions: int, num_sequences: int = 1
) -> int:
    """Matrix products of one row's forward pass, every position of the row counted, padding too.

    `num_predictions` are the row's prediction slots, `num_sequences` its sequence slots (1 without packing). Attention
    counts the full s x s scores, which is what masked attention computes (a causal one too: half are then hidden).
    """
    s, p, h, f = seq_length, num_predictions, config.hidden_size, config.intermediate_size
    layer = 2 * s * (4 * h * h + 2 * h * f) + 2 * (2 * s * s * h)
    if config.is_decoder:
        return config.num_layers * layer + 2 * s * h * _vocab_size(config)
    masked_lm = 2 * p * (h * h + h * _vocab_size(config))
    next_sentence = 2 * num_sequences * (h * h + 2 * h) if "next_sentence" in terms else 0
    return config.num_layers * layer + masked_lm + next_sentence


def training_flops_per_row(
    config: TransformerSection, terms: Sequence[str], seq_length: int, num_predictions: int, num_sequences: int = 1
) -> int:
    """Forward and backward; recomputed activations are not counted (they are no useful work)."""
    forward = forward_flops_per_row(config, terms, seq_length, num_predictions, num_sequences)
    return (1 + BACKWARD_FACTOR) * forward


def _vocab_size(config: TransformerSection) -> int:
    if config.vocab_size is None:
        raise ValueError("config.vocab_size must be set before counting")
    return config.vocab_size

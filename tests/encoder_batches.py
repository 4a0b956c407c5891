"""Random micro-batches of chosen lengths, collated by the project's own loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ctxlm_ds.data.sample import Batch, Example
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.objectives.base import build_objective
from tests.ragged import Rows, collate
from tests.sections import model_section, objective_section

PAD_ID = 1
FIRST_WORD_ID = 5
TERMS = ("masked_lm", "next_sentence")
OUTPUTS = ("predicted_logits", "sentence_logits")
"""What these terms read of an encoder."""


def tiny_model(**changes: object) -> TransformerSection:
    """A model small enough for a test of its values: no dropout unless asked for."""
    settings = {
        "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "max_position_embeddings": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.2,
    }  # fmt: skip
    return model_section(**settings | changes)


def random_example(length: int, vocab_size: int, rng: np.random.Generator) -> Example:
    """A sequence of ordinary words, its second half of token type 1, about a fifth of it to predict."""
    positions = np.sort(rng.choice(length, size=max(1, length // 5), replace=False))
    return Example(
        input_ids=rng.integers(FIRST_WORD_ID, vocab_size, length),
        token_type_ids=(np.arange(length) >= length // 2).astype(np.int64),
        prediction_positions=positions,
        prediction_labels=rng.integers(FIRST_WORD_ID, vocab_size, len(positions)),
        sequence_label=int(rng.integers(2)),
    )


def random_rows(lengths: Sequence[Sequence[int]], vocab_size: int, seed: int) -> list[list[Example]]:
    """Examples of the given lengths: one list of lengths a row."""
    rng = np.random.default_rng(seed)
    return [[random_example(length, vocab_size, rng) for length in row] for row in lengths]


def batch_of(
    rows: Sequence[Sequence[Example]], seq_length: int, terms: tuple[str, ...] = TERMS, slots: int = 6
) -> Batch:
    """The rows as a Batch; as many sequence slots as the fullest row has."""
    sequences = max(1, *(len(row) for row in rows))
    name = "masked_lm_nsp" if "next_sentence" in terms else "masked_lm"
    objective = build_objective(objective_section(name=name, max_predictions=slots))
    objective.pad_id = PAD_ID
    return collate(rows, objective, Rows(seq_length, sequences))


def random_batch(
    lengths: Sequence[Sequence[int]],
    config: TransformerSection,
    seq_length: int,
    terms: tuple[str, ...] = TERMS,
    seed: int = 0,
) -> Batch:
    """Rows of random sequences of the given lengths."""
    assert config.vocab_size is not None
    return batch_of(random_rows(lengths, config.vocab_size, seed), seq_length, terms)

"""Inputs on which two models are compared: random ids, the longest row, and real text through the tokenizer.

In: a folder with the tokenizer as transformers loads it, and ours. Out: fields of a batch, by the name of the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import FamilyExport, Fields, Rows
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.tokenizers.base import Tokenizer

MAX_PREDICTIONS = 16
"""Positions of a row whose logits over the vocabulary are compared."""
UNLIMITED_LENGTH = 512
"""Longest row for a model that can read any length."""
SHORT_LENGTH = 24
SEED = 20181011

TEXT_PAIRS = (
    ("It was the best of times, it was the worst of times.", "It was the age of wisdom, the age of foolishness."),
    ("Call me Ishmael.", "Some years ago I thought I would sail about a little and see the watery part of the world."),
    ("The quality of mercy is not strained; it droppeth as the gentle rain from heaven.", "2 + 2 = 4"),
)
"""Real text (Dickens, Melville, Shakespeare; public domain) for models of any language: only the ids matter."""


def longest_row(model: ModelSection) -> int:
    """Return the longest row to be compared."""
    return model.longest_sequence or UNLIMITED_LENGTH


def build_inputs(folder: Path, export: FamilyExport, model: ModelSection, tokenizer: Tokenizer) -> dict[str, Fields]:
    """Return inputs by name: `random` (a padded batch), `longest` (every position) and `text`.

    Raises:
        ExportError: the tokenizer as transformers loads it does not give the ids that the model was trained on.
    """
    rng = np.random.default_rng(SEED)
    longest = longest_row(model)
    short = min(SHORT_LENGTH, longest)
    num_types = min(2, export.num_token_types(model))
    rows = {
        name: _random_rows(rng, model, tokenizer.pad_id, num_types, lengths)
        for name, lengths in {"random": [short, max(2, short // 2), max(2, short - 3)], "longest": [longest]}.items()
    }
    rows["text"] = export.text_rows(_loaded_tokenizer(folder, tokenizer), model, tokenizer, TEXT_PAIRS)
    inputs = {name: make_fields(some, tokenizer.pad_id, rng) for name, some in rows.items()}
    return {name: fields | export.more_fields(model, fields) for name, fields in inputs.items()}


def _random_rows(
    rng: np.random.Generator, model: ModelSection, pad_id: int, num_types: int, lengths: Sequence[int]
) -> Rows:
    """Draw ids over the whole vocabulary but padding, and token types from 0 up."""
    assert model.vocab_size is not None
    ids = [(pad_id + rng.integers(1, model.vocab_size, length)) % model.vocab_size for length in lengths]
    types = [[position * num_types // length for position in range(length)] for length in lengths]
    return Rows([row.tolist() for row in ids], types)


def _loaded_tokenizer(folder: Path, tokenizer: Tokenizer) -> Any:
    """Load the folder's tokenizer with transformers and compare its ids of real text with ours."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    texts = [text for pair in TEXT_PAIRS for text in pair]
    for text, expected in zip(texts, tokenizer.encode_batch(texts), strict=True):
        ids = loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids != expected:
            raise ExportError(f"the exported tokenizer gives {ids} for {text!r}, the model was trained on {expected}")
    return loaded


def make_fields(rows: Rows, pad_id: int, rng: np.random.Generator) -> Fields:
    """Put one sequence in a row, padded to the longest, with the same number of predicted positions in each row."""
    length = max(len(row) for row in rows.ids)
    predictions = min(MAX_PREDICTIONS, min(len(row) for row in rows.ids))

    def padded(values: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
        return torch.tensor([[*row, *[fill] * (length - len(row))] for row in values])

    chosen = [sorted(rng.choice(len(row), predictions, replace=False).tolist()) for row in rows.ids]
    return {
        "input_ids": padded(rows.ids, pad_id),
        "token_type_ids": padded(rows.types, 0),
        "position_ids": padded([range(len(row)) for row in rows.ids], 0),
        "sequence_ids": padded([[1] * len(row) for row in rows.ids], 0),
        "sequence_starts": torch.tensor([[0, len(row)] for row in rows.ids]),
        "prediction_positions": torch.tensor(chosen),
        "cls_positions": torch.zeros(len(rows.ids), 1, dtype=torch.int64),
    }


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' own progress bars and reports: what matters of them is raised as an error."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()

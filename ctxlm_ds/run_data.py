"""Data of a run on every rank: tokenizer, rows, loaders, and what evaluations count by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ctxlm_ds.console import logger
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import EvalLoader, TrainLoader
from ctxlm_ds.data.stream.run_datasets import RunRows, build_run_rows
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import LossTerm, Objective, build_objective
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.schema import EvaluationConfig, RunConfig, TrainingConfig
from ctxlm_ds.recipe.sections import DataSection, RowSettings
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.training.continuations import encode_prompts

_SPACES = (*range(0x9, 0xE), 0x20)
"""ASCII white space."""
_BYTE_LEVEL = str.maketrans({chr(0x100 + byte): " " for byte in _SPACES})
"""Byte-level BPE writes the bytes up to the space as the characters from U+0100."""
_PIECES = str.maketrans({"▁": " "} | {chr(byte): " " for byte in _SPACES})
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class RunData:
    """What a run reads."""

    tokenizer: Tokenizer
    objective: Objective
    prompts: list[list[int]]
    """evaluation.prompts, encoded."""
    rows: RunRows
    description: dict[str, Any]
    """Facts of the training rows, the same on every rank and in every start of the run."""


def build_data(config: RunConfig, tokenizer: Tokenizer, topology: Topology) -> RunData:
    """Build or open what a run reads; a prompt or source that does not fit, or a rank's other data, raise on all."""
    objective = build_objective(config.objective, tokenizer)
    prompts = encode_prompts(config.evaluation.prompts, config.data, objective, tokenizer)
    logger.info("reading the data")
    rows = build_rows_by_node(config.row_settings, tokenizer, objective, topology)
    description = agreed_data(rows.describe(config.data.train, tokenizer), topology)
    return RunData(tokenizer, objective, prompts, rows, description)


def build_rows_by_node(
    settings: RowSettings, tokenizer: Tokenizer, objective: Objective, topology: Topology
) -> RunRows:
    """Build or open the rows of the run on every rank; errors of build_run_rows are raised on every rank.

    The first rank of each node builds missing sample indexes or waits for another node, then the others open them. This
    works with local and shared disks. Rank 0 also compares the checksums of existing indexes, unless they are as they
    were when they were last compared.
    """

    def build() -> RunRows:
        return build_run_rows(settings, tokenizer, objective, verify="changed" if topology.is_main else "none")

    rows = topology.run_together(lambda: build() if topology.local_rank == 0 else None)
    return topology.run_together(lambda: build() if rows is None else rows)


def agreed_data(own: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Return the description of the data; raises DataError on every rank if a rank has other data."""
    first = topology.broadcast_object(own)
    for rank, description in topology.gather_some(None if own == first else own).items():
        raise DataError(
            f"rank {rank} reads other data than rank 0 ({description} instead of {first}); copy the same "
            "datasets to every node and check them with ctxlm inspect --verify"
        )
    return own


def build_loaders(
    data: DataSection, training: TrainingConfig, evaluation: EvaluationConfig, rows: RunRows, objective: Objective,
    topology: Topology, start_row: int, device: torch.device | None = None,
) -> tuple[TrainLoader, Mapping[str, Iterable[Batch | None]]]:  # fmt: skip
    """Return the training steps from row `start_row` on and the held-out batches; inner pipeline stages get no data."""
    idle = 0 < topology.pipeline_parallel_rank < topology.pipeline_parallel_size - 1
    ranks = topology.data_parallel_rank, topology.data_parallel_size
    loaders = {
        name: EvalLoader(source, objective, data, training, evaluation, ranks, device)
        for name, source in rows.validation.items()
    }
    validation = {name: [None] * len(loader) if idle else loader for name, loader in loaders.items()}
    return TrainLoader(rows.train, objective, data, training, ranks, start_row, idle, device), validation


def held_out_words(
    section: DataSection, training: TrainingConfig, evaluation: EvaluationConfig, data: RunData
) -> dict[str, float]:
    """Return the tokens per word of the held-out sources of a causal model, if its tokens keep the text's spaces."""
    term = next((term for term in data.objective.terms if term.has_perplexity), None)
    counts = None if term is None or data.objective.next_tokens is None else word_counts(data.tokenizer)
    if term is None or counts is None:
        return {}
    sections = section, training, evaluation
    loaders = {name: EvalLoader(rows, data.objective, *sections) for name, rows in data.rows.validation.items()}
    found = {name: tokens_per_word(loader, term, counts) for name, loader in loaders.items()}
    return {name: number for name, number in found.items() if number is not None}


@dataclass(frozen=True)
class WordCounts:
    """What each token of a vocabulary says about words, [vocab_size] each."""

    inside: NDArray[np.int64]
    """Words that begin after a space of the token."""
    begins: NDArray[np.bool_]
    """True if the first character begins a word if a space is before the token."""
    ends_in_space: NDArray[np.bool_]
    """True if a word may begin with the next token."""

    def count(self, previous: NDArray[np.int64], tokens: NDArray[np.int64]) -> int:
        """Return how many words begin in `tokens` [k], which follow `previous` [k]."""
        return int((self.inside[tokens] + (self.begins[tokens] & self.ends_in_space[previous])).sum())


def word_counts(tokenizer: Tokenizer) -> WordCounts | None:
    """Return the table of a vocabulary; None if its tokens do not keep spaces (WordPiece, GPT-1's BPE).

    A word is a longest run of characters other than ASCII white space, as `str.split` finds words in English text.
    Special tokens are no text, and end a word.
    """
    decoder = json.dumps(tokenizer.content.get("decoder"), ensure_ascii=False)
    if '"ByteLevel"' in decoder:
        spaces = _BYTE_LEVEL
    elif "▁" in decoder:
        spaces = _PIECES
    else:
        return None
    size = tokenizer.vocab_size
    inside, begins = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.bool_)
    ends_in_space = np.ones(size, dtype=np.bool_)
    for token, number in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        byte = _BYTE_PIECE.fullmatch(token) if spaces is _PIECES else None
        text = chr(int(byte[1], 16)) if byte else token
        text = text.translate(spaces)
        if number in tokenizer.special_ids or not text:
            continue
        inside[number] = len(re.findall(r" [^ ]", text))
        begins[number] = text[0] != " "
        ends_in_space[number] = text[-1] == " "
    return WordCounts(inside, begins, ends_in_space)


def tokens_per_word(batches: Iterable[Batch], term: LossTerm, counts: WordCounts) -> float | None:
    """Return predicted tokens per word that begins among them; None without a word. `term` predicts next tokens."""
    tokens = words = 0
    for batch in batches:
        labels, inputs = (batch.fields[name].numpy() for name in (term.labels[0], "input_ids"))
        predicted = labels != IGNORE_LABEL
        tokens += int(predicted.sum())
        words += counts.count(inputs[predicted], labels[predicted])
    return tokens / words if words else None

"""Small datasets of invented tokens and a tokenizer's facts without a tokenizer, for the tests of samples and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.writer import IndexedDatasetWriter
from ctxlm_ds.data.index.sentence_table import UNALIGNED, SentenceTable
from ctxlm_ds.recipe.schema import RunConfig

SPECIALS = {"pad_id": 0, "unk_id": 1, "cls_id": 2, "sep_id": 3, "mask_id": 4}
FIRST_WORD_ID = 5


@dataclass
class FakeTokenizer:
    """The facts of a tokenizer; ids from 5 on are words, the odd ones continue a word."""

    vocab_size: int = 1000
    double_separator: bool = False
    fingerprint: str = "fake"
    kind: str = "wordpiece"
    sentence_prefix: str = ""
    pad_id: int = 0
    unk_id: int = 1
    cls_id: int = 2
    sep_id: int = 3
    mask_id: int = 4
    special_ids: frozenset[int] = field(default_factory=lambda: frozenset(range(FIRST_WORD_ID)))

    def word_start_mask(self) -> NDArray[np.bool_]:
        return (np.arange(self.vocab_size) % 2 == 0) | (np.arange(self.vocab_size) < FIRST_WORD_ID)

    def id_to_token(self, token_id: int) -> str:
        names = {0: "[PAD]", 1: "[UNK]", 2: "[CLS]", 3: "[SEP]", 4: "[MASK]"}
        return names.get(token_id, f"{'##' if token_id % 2 else ''}w{token_id}")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.id_to_token(token_id) for token_id in ids)


Documents = list[list[list[int]]]


def random_documents(
    num_documents: int, sentences: int = 12, tokens: int = 20, seed: int = 0, vocab_size: int = 1000
) -> Documents:
    """Documents of 1..2·sentences sentences of 1..2·tokens random tokens."""
    rng = np.random.default_rng(seed)
    return [
        [
            rng.integers(FIRST_WORD_ID, vocab_size, size=rng.integers(1, 2 * tokens)).tolist()
            for _ in range(rng.integers(1, 2 * sentences))
        ]
        for _ in range(num_documents)
    ]


def numbered_documents(shape: Sequence[Sequence[int]]) -> Documents:
    """Documents of sentences of the given lengths, whose tokens are numbered through from FIRST_WORD_ID on."""
    counter = iter(range(FIRST_WORD_ID, 10**9))
    return [[[next(counter) for _ in range(length)] for length in document] for document in shape]


def table_of(documents: Documents) -> SentenceTable:
    """The sentence table of documents that lie one after another."""
    lengths = [len(sentence) for document in documents for sentence in document]
    ends = np.cumsum(lengths)
    starts = (ends - lengths).view(UNALIGNED)
    starts.flags.writeable = False
    bounds = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    return SentenceTable(starts, 0, bounds, ends[bounds[1:] - 1], True)


def starts_of(table: SentenceTable) -> NDArray[np.int64]:
    """[N] first token of each sentence."""
    starts: NDArray[np.int64] = table.offsets["value"] >> table.shift
    return starts


def ends_of(table: SentenceTable) -> NDArray[np.int64]:
    """[N] the token after each sentence's last."""
    ends = np.append(starts_of(table)[1:], 0)
    ends[table.documents[1:] - 1] = table.document_ends
    return ends


def write_dataset(
    prefix: Path,
    documents: Documents,
    split_sentences: bool = True,
    eod_id: int | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write documents as an indexed dataset; with `eod_id` each ends with that token."""
    with IndexedDatasetWriter(prefix, np.dtype("<i4")) as writer:
        for document in documents:
            sentences = document if split_sentences else [sum(document, [])]
            for number, sentence in enumerate(sentences):
                ends_document = number == len(sentences) - 1 and eod_id is not None
                writer.add_sequence([*sentence, eod_id] if ends_document else sentence)
            writer.end_document()
        recorded = {
            "tokenizer_fingerprint": "fake",
            "split_sentences": split_sentences,
            "append_eod": eod_id is not None,
            "eod_id": eod_id,
        }
        writer.finalize(recorded | (metadata or {}))
    return prefix


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """A small recipe; `sections` replace its settings (`data={"packing": True}`)."""
    settings: dict[str, dict[str, Any]] = {
        "data": {"seq_length": 64, "num_workers": 0},
        "training": {"global_batch_size": 8, "micro_batch_size": 2, "seed": 7},
    }
    for section, values in sections.items():
        settings[section] = settings.get(section, {}) | values
    return RunConfig.model_validate(settings)

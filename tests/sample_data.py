"""Small datasets of invented tokens and a tokenizer's facts without a tokenizer, for the tests of samples and masks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctxlm_ds.atomic import partial_path
from ctxlm_ds.data.dataset.writer import IndexedDatasetWriter, publish_parts
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource, SampleIndex, SampleReader
from ctxlm_ds.data.index.record import SourcePart
from ctxlm_ds.data.index.sentence_table import UNALIGNED, SentenceTable, end_of, read_only
from ctxlm_ds.data.sample import Samples, empty_samples
from ctxlm_ds.data.stream.loader import EvalLoader, TrainLoader
from ctxlm_ds.objectives.base import Objective
from ctxlm_ds.recipe.schema import RunConfig
from tests.ragged import Sample, one_sample

SPECIALS = {"pad_id": 0, "unk_id": 1, "cls_id": 2, "sep_id": 3, "mask_id": 4}
FIRST_WORD_ID = 5
FULL_STOP = 6


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

    def token_to_id(self, token: str) -> int | None:
        """6 is the full stop, the last hundred ids are T5's sentinels."""
        if token == ".":
            return FULL_STOP
        number = token.removeprefix("<extra_id_").removesuffix(">")
        return self.vocab_size - 1 - int(number) if number.isdigit() and int(number) < 100 else None

    def id_to_token(self, token_id: int) -> str:
        names = {0: "[PAD]", 1: "[UNK]", 2: "[CLS]", 3: "[SEP]", 4: "[MASK]"}
        return names.get(token_id, f"{'##' if token_id % 2 else ''}w{token_id}")

    def shown(self, token_id: int) -> tuple[str, str]:
        return " ", self.id_to_token(token_id)

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
    bounds = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    starts, first_sentences = (read_only(places.view(UNALIGNED)) for places in (ends - lengths, bounds))
    return SentenceTable(starts, 0, first_sentences, ends[bounds[1:] - 1], int(ends[-1]), 0, True)


def starts_of(table: SentenceTable) -> NDArray[np.int64]:
    """[N] first token of each sentence."""
    starts: NDArray[np.int64] = table.offsets["value"] >> table.shift
    return starts


def ends_of(table: SentenceTable) -> NDArray[np.int64]:
    """[N] the token after each sentence's last."""
    documents = np.repeat(np.arange(table.num_documents), np.diff(table.bounds)).tolist()
    return np.array([end_of(table, *pair) for pair in enumerate(documents)])


def build_sample_index(part: SourcePart | str | Path, tokenizer: Any, config: RunConfig, *args: Any, **options: Any
) -> SampleIndex:  # fmt: skip
    """The sample index of one source, built if it does not exist."""
    return build_rows([part], tokenizer, config.row_settings, *args, **options).indexes[0]


def samples_of_row(index: SampleIndex, row: int) -> list[int]:
    """The numbers of a row's samples."""
    numbers: list[int] = index.samples_of(np.array([row]))[0].tolist()
    return numbers


def locate(rows: RowSource, row: int) -> tuple[SampleIndex, int]:
    """The index that holds a row, and the row's number there."""
    (source,), (number,) = rows.sources(np.array([row]))
    return rows.indexes[source], int(number)


class DatasetWriter(IndexedDatasetWriter):
    """Writes a dataset sequence by sequence; leaves nothing behind unless `finalize` was reached."""

    def __init__(self, prefix: Path, dtype: str, overwrite: bool = False) -> None:
        self.partial = partial_path(Path(prefix))
        self._sequences: list[NDArray[np.int64]] = []
        super().__init__(prefix, np.dtype(dtype), overwrite, self.partial)

    def add_sequence(self, ids: ArrayLike) -> None:
        self._sequences.append(np.asarray(ids, dtype=np.int64))

    def end_document(self) -> None:
        sequences, self._sequences = self._sequences, []
        lengths = [len(sequence) for sequence in sequences]
        self.add_documents(np.concatenate([np.empty(0, np.int64), *sequences]), lengths, np.array([len(lengths)]))

    def finalize(self, metadata: dict[str, Any]) -> None:
        self.prepare(metadata)
        publish_parts(self.prefix, self.partial)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.partial, ignore_errors=True)


def write_dataset(
    prefix: Path,
    documents: Documents,
    split_sentences: bool = True,
    eod_id: int | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write documents as an indexed dataset; with `eod_id` each ends with that token."""
    with DatasetWriter(prefix, "<i4") as writer:
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


def sample_of(index: SampleIndex, number: int) -> Sample:
    """Return a sample before corruption."""
    return one_sample(read_samples(index.reader, np.array([number])), 0)


def read_samples(reader: SampleReader, numbers: NDArray[np.int64]) -> Samples:
    """Return samples `numbers`, keyed by their number alone."""
    samples = empty_samples(reader.lengths(numbers), reader.has_spans)
    reader.fill(samples, np.arange(len(numbers)), numbers)
    samples.keys[:, 0] = numbers
    return samples


def train_loader(rows: RowSource, objective: Objective, config: RunConfig, **options: Any) -> TrainLoader:
    return TrainLoader(rows, objective, config.data, config.training, **options)


def eval_loader(rows: RowSource, objective: Objective, config: RunConfig, **options: Any) -> EvalLoader:
    return EvalLoader(rows, objective, config.data, config.training, config.evaluation, **options)

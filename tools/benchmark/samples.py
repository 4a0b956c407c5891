"""The sample index against Megatron's C++ helpers (megatron.core.datasets.helpers_cpp), as ratios.

Both sides get the same lengths in memory and make one epoch. Speeds are in sentences or documents of the corpus.
build_mapping cuts documents into runs of sentences and shuffles them, as doc_sentences does. segment_pair also draws A,
B and a random next segment and shortens them, which Megatron does when it reads a sample.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.console import counted
from ctxlm_ds.data.formats.base import Making, SequenceTemplate
from ctxlm_ds.data.formats.loops.running_text import block_pieces
from ctxlm_ds.data.formats.pairs import SegmentPairSection
from ctxlm_ds.data.index.record import SampleSettings
from ctxlm_ds.data.index.sentence_table import UNALIGNED, SentenceTable, read_only
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.registry import FORMATS
from tools.benchmark.timing import compare

SEQ_LENGTH = 512
SENTENCES_PER_DOCUMENT = 20
TOKENS_PER_SENTENCE = 25
SHORT_SEQ_PROB = 0.1
ONE_EPOCH_WITHOUT_LIMIT = 2**31 - 1
TEMPLATE = SequenceTemplate(cls_id=2, sep_id=3, pad_id=0, double_separator=False, vocab_size=30_522)


def compare_samples(documents: int, rounds: int = 5) -> Iterator[str]:
    """Yield the lines of a table per format: one thread, then all cores if a format uses several."""
    try:
        from megatron.core.datasets import helpers_cpp
    except ImportError as error:
        raise ConfigError(f"the peer of this benchmark is missing ({error}): pip install megatron-core") from error
    lengths, bounds, table = made_up_corpus(documents)
    room = SEQ_LENGTH - SegmentPairSection.special_tokens(TEMPLATE.double_separator)
    mapping = partial(
        helpers_cpp.build_mapping, bounds, lengths, 1, ONE_EPOCH_WITHOUT_LIMIT, room, SHORT_SEQ_PROB, 1, False, 2
    )
    threads = sorted({1, len(os.sched_getaffinity(0))})
    for sample_format, counts in (("segment_pair", threads), ("doc_sentences", threads), ("full_sentences", [1])):
        for workers in counts:
            ours = partial(_run_through, partial(_records, table, sample_format, workers), table.num_sentences)
            lines = compare(ours, lambda: len(mapping()) and len(lengths), rounds, "sentences/s", "build_mapping")
            yield f"{sample_format}, {counted(workers, 'thread')}"
            yield from (f"  {line}" for line in lines)
    sizes = np.add.reduceat(lengths, bounds[:-1], dtype=np.int32)
    order = np.arange(documents, dtype=np.int32)
    num_tokens = int(sizes.sum(dtype=np.int64))
    blocks = partial(helpers_cpp.build_sample_idx_int32, sizes, order, SEQ_LENGTH, 1, num_tokens, False, 1)
    ends = np.array([0, num_tokens])
    ours = partial(_run_through, lambda: block_pieces(ends, SEQ_LENGTH, 1), documents)
    lines = compare(ours, lambda: len(blocks()) and documents, rounds, "documents/s", "build_sample_idx")
    yield "blocks, reset_at_documents false, 1 thread"
    yield from (f"  {line}" for line in lines)


def made_up_corpus(documents: int) -> tuple[NDArray[np.int32], NDArray[np.int64], SentenceTable]:
    """Return [n] tokens of each sentence, [documents + 1] first sentence of each document, and their table."""
    draws = np.random.default_rng(0)
    sentences = draws.poisson(SENTENCES_PER_DOCUMENT - 1, documents) + 1
    bounds = np.concatenate([[0], np.cumsum(sentences)]).astype(np.int64)
    lengths = (draws.poisson(TOKENS_PER_SENTENCE - 1, bounds[-1]) + 1).astype(np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts, first_sentences = (read_only(places.view(UNALIGNED)) for places in (ends - lengths, bounds))
    return lengths, bounds, SentenceTable(starts, 0, first_sentences, ends[:0], int(ends[-1]), 0, True)


def _run_through(make: Callable[[], Iterable[object]], count: int) -> int:
    deque(make(), maxlen=0)
    return count


def _records(table: SentenceTable, sample_format: str, workers: int) -> Iterable[object]:
    settings = SampleSettings(
        sample_format=sample_format, seq_length=SEQ_LENGTH, num_duplicates=1, seed=1, packing=False,
        max_sequences_per_row=1, static_masking=None, own={"short_seq_prob": SHORT_SEQ_PROB},
    )  # fmt: skip
    nothing: Any = SimpleNamespace(prefix="made up")
    records: Iterable[object] = FORMATS.get(sample_format)().records(
        table, Making(nothing, (0, 0), settings, TEMPLATE, workers), 0
    )
    return records

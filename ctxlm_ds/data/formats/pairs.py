"""Pairs of segments with next-sentence labels: BERT's segment pairs, and pairs of single sentences (Liu 2019)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from ctxlm_ds.data.formats.base import Making, RowFormat, RowSection, SequenceTemplate
from ctxlm_ds.recipe.section import Probability
from ctxlm_ds.recipe.sections import DataSection, ModelSection

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.formats.base import Fill, Numbers, Records
    from ctxlm_ds.data.index.sentence_table import SentenceTable


class PairSection(RowSection):
    """Rows of two segments."""

    def special_tokens(self, model: ModelSection) -> int:
        return 4 if model.double_separator else 3

    @property
    def shortest_text(self) -> int:
        return 2


class SegmentPairSection(PairSection):
    """Rows of two segments of several sentences each (BERT)."""

    fixed: ClassVar[tuple[str, ...]] = (*PairSection.fixed, "short_seq_prob")

    sample_format: str = "segment_pair"
    short_seq_prob: Probability = 0.1
    """Share of documents whose target length is drawn shorter (BERT 0.1)."""


class SentencePairSection(PairSection):
    """Rows of two single sentences (RoBERTa's SENTENCE-PAIR + NSP)."""

    sample_format: str = "sentence_pair"


class PairFormat(RowFormat):
    """A format of PairSection: two segments, the second one of the same document or of another."""

    makes_pairs = True
    sequence_labels = ("B follows A", "B is from another document")

    def special_tokens(self, template: SequenceTemplate) -> int:
        return template.pair_specials

    @abstractmethod
    def chooser(self) -> Callable[..., tuple[int, int]]:
        """Return the compiled loop that chooses the pairs of a range of documents (loops/pairs.py)."""

    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        from ctxlm_ds.data.formats.loops.pairs import PairSettings, make_pairs
        from ctxlm_ds.data.formats.loops.ranges import document_ranges, in_order
        from ctxlm_ds.data.index.sentence_table import require_pairs_possible
        from ctxlm_ds.data.numba_random import stream_key

        room, settings = self.room(making), making.settings
        require_pairs_possible(table, making.dataset.prefix, self.name)
        key = stream_key(settings.seed, self.name)
        short_seq_prob = settings.own.get("short_seq_prob", 0.0)
        pass_settings = PairSettings(room, making.template.pair_specials, short_seq_prob, key, duplicate)
        choose, ranges = self.chooser(), document_ranges(table.documents)
        return in_order(lambda documents: make_pairs(choose, table, pass_settings, documents), ranges, making.workers)

    def reader(self, dataset: IndexedDataset, template: SequenceTemplate) -> Fill:
        import numpy as np

        from ctxlm_ds.data.formats.loops.framing import frame_pairs

        tokens = np.asarray(dataset.tokens)
        return lambda samples, slots, records, numbers: frame_pairs(samples, slots, records, numbers, tokens, template)

    def second_starts(self, records: Records, numbers: Numbers, lengths: Numbers) -> Numbers:
        return records["a_end"][numbers] - records["a_start"][numbers] + 2


class SegmentPair(PairFormat):
    """SEGMENT-PAIR + NSP of BERT."""

    name = "segment_pair"
    section = SegmentPairSection

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        return {"short_seq_prob": data.short_seq_prob}  # type: ignore[attr-defined]

    def chooser(self) -> Callable[..., tuple[int, int]]:
        from ctxlm_ds.data.formats.loops.pairs import choose_segment_pairs

        return choose_segment_pairs


class SentencePair(PairFormat):
    """SENTENCE-PAIR + NSP."""

    name = "sentence_pair"
    section = SentencePairSection

    def joins_sentences(self, data: DataSection) -> bool:
        return False

    def chooser(self) -> Callable[..., tuple[int, int]]:
        from ctxlm_ds.data.formats.loops.pairs import choose_sentence_pairs

        return choose_sentence_pairs

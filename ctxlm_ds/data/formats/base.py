"""What a sample format is to the rest of the system: which samples a dataset becomes, and how rows hold them.

A format is one file with its settings (a DataSection without torch and numpy) and a SampleFormat; compiled loops are
imported when they run. One line of registry.py names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ctxlm_ds.data.formats.loops.template import SINGLE_SPECIALS
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.section import SmallInt
from ctxlm_ds.recipe.sections import DataSection, ModelSection

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.formats.loops.template import SequenceTemplate
    from ctxlm_ds.data.index.record import SampleSettings
    from ctxlm_ds.data.index.sentence_table import SentenceTable
    from ctxlm_ds.data.sample import Samples

    Records = NDArray[Any]
    Numbers = NDArray[np.int64]
    Fill = Callable[[Samples, Numbers, Records, Numbers], int]

SMALLEST_ROOM = 2


class Making(NamedTuple):
    """What samples are made of."""

    dataset: IndexedDataset
    documents: tuple[int, int]
    """First document, and the one after the last."""
    settings: SampleSettings
    template: SequenceTemplate
    workers: int = 1
    """Threads, on which nothing depends."""


class MadeSamples(NamedTuple):
    """The samples of a dataset while they are made."""

    documents: int
    sentences: int
    pieces: Iterator[tuple[Records, Numbers | None]]
    """[n] records (index/record.py), and beside them [r] how many samples each row has that ends among them; None if
    the format leaves the forming of rows to packing."""


class SampleFormat(ABC):
    """How a dataset becomes samples."""

    name: ClassVar[str]
    section: ClassVar[type[DataSection]]
    makes_pairs: ClassVar[bool] = False
    """Whether a sample has a second segment and a label that says whether it follows the first."""
    shifted: ClassVar[bool] = False
    """Whether a sample's last token is a label only: what the last input predicts."""
    forms_rows: ClassVar[bool] = False
    """Whether it says which samples share a row; otherwise each has its own, or data.packing puts them together."""
    sequence_labels: ClassVar[tuple[str, ...]] = ()
    """What a sequence's label says, by its number; empty: sequences have no label."""

    def passes(self, data: DataSection) -> int:
        """Return how many passes over the dataset one epoch makes."""
        return 1

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        """Return the settings that change the samples and that other formats have not."""
        return {}

    @abstractmethod
    def make(self, making: Making) -> MadeSamples:
        """Make every sample of the documents.

        Raises:
            ConfigError: seq_length is too short.
            DataError: the dataset lacks what the format needs.
        """

    @abstractmethod
    def reader(self, dataset: IndexedDataset, template: SequenceTemplate) -> Fill:
        """Return what writes samples into their places: (samples, slots [c], records, numbers [c]) -> WHOLE.

        It fills everything of samples.Samples but `starts` and `keys`; if a sample is damaged, it returns the place of
        that sample's number (loops/framing.py).
        """

    def second_starts(self, records: Records, numbers: Numbers, lengths: Numbers) -> Numbers:
        """Return the [c] positions from which token types are 1; a sample's length if it has one segment."""
        return lengths


class RowSection(DataSection):
    """Rows of one sequence, or with `packing` of several."""

    fixed: ClassVar[tuple[str, ...]] = (*DataSection.fixed, "packing", "max_sequences_per_row", "num_duplicates")
    by_sentence: ClassVar[bool] = True

    packing: bool = False
    """Put several short sequences into one row; they never see each other and their positions restart."""
    max_sequences_per_row: SmallInt = 8
    """Most sequences in one row when packing."""
    num_duplicates: SmallInt = 1
    """Passes over the corpus with newly drawn samples in one epoch (BERT's dupe_factor; 10 with static masking)."""

    @property
    def shares_rows(self) -> bool:
        return self.packing

    @property
    def sequences_per_row(self) -> int:
        return self.max_sequences_per_row if self.packing else 1

    @property
    def passes(self) -> int:
        return self.num_duplicates

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return () if self.packing else ("max_sequences_per_row",)

    def special_tokens(self, model: ModelSection) -> int:
        """Special tokens of a sample."""
        return SINGLE_SPECIALS

    @property
    def shortest_text(self) -> int:
        """Tokens of text that a sample has at least."""
        return 1

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        yield from super().problems(model)
        special = self.special_tokens(model)
        least = special + self.shortest_text
        if self.seq_length < least:
            yield Problem(
                "data.seq_length",
                f"{self.seq_length} leaves no room for text: {special} positions are special tokens; set at least "
                f"{least}",
                ("data.sample_format", "model.family"),
            )
        if self.packing and self.max_sequences_per_row < 2:
            text = "1 packs nothing; set it to 2 or more, or data.packing to false"
            yield Problem("data.max_sequences_per_row", text, ("data.packing",))


class PairSection(RowSection):
    """Rows of two segments."""

    def special_tokens(self, model: ModelSection) -> int:
        return 4 if model.double_separator else 3

    @property
    def shortest_text(self) -> int:
        return 2


class RowFormat(SampleFormat):
    """A format of RowSection: samples of sentences, each framed by special tokens."""

    section: ClassVar[type[RowSection]]

    def passes(self, data: DataSection) -> int:
        passes: int = data.num_duplicates  # type: ignore[attr-defined]
        return passes

    def special_tokens(self, template: SequenceTemplate) -> int:
        """Return how many special tokens frame a sample."""
        return SINGLE_SPECIALS

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.index.sentence_table import sentence_table

        table = sentence_table(making.dataset, making.template.sep_id, making.documents)
        passes = range(making.settings.num_duplicates)
        pieces = ((records, None) for number in passes for records in self.records(table, making, number))
        return MadeSamples(table.num_documents, table.num_sentences, pieces)

    @abstractmethod
    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        """Yield the records of pass `duplicate` in the order of the documents.

        Raises:
            ConfigError: seq_length is too short for the format.
            DataError: the dataset lacks what the format needs.
        """

    def room(self, making: Making) -> int:
        """Return the most tokens of text in a sample.

        Raises:
            ConfigError: there is no room for text.
        """
        specials = self.special_tokens(making.template)
        room = making.settings.seq_length - specials
        if room < SMALLEST_ROOM:
            raise ConfigError(
                f"data.seq_length {making.settings.seq_length} leaves {room} tokens beside {specials} special ones; "
                f"{self.name} needs at least {specials + SMALLEST_ROOM}"
            )
        return room

    def reader(self, dataset: IndexedDataset, template: SequenceTemplate) -> Fill:
        import numpy as np

        from ctxlm_ds.data.formats.loops.framing import frame_texts

        tokens = np.asarray(dataset.tokens)
        texts = self.texts(dataset, template)
        return lambda samples, slots, records, numbers: frame_texts(
            samples, slots, records, numbers, tokens, texts, template
        )

    def texts(self, dataset: IndexedDataset, template: SequenceTemplate) -> tuple[Numbers, Numbers]:
        """Return [t] bounds of the texts that a separator ends in a sample: here the whole dataset is one."""
        import numpy as np

        return np.zeros(1, dtype=np.int64), np.full(1, len(dataset.tokens))


class PairFormat(RowFormat):
    """A format of PairSection: two segments, the second one of the same document or of another."""

    makes_pairs = True
    sequence_labels = ("B follows A", "B is from another document")

    def special_tokens(self, template: SequenceTemplate) -> int:
        return template.pair_specials

    @abstractmethod
    def chooser(self) -> Callable[..., tuple[int, int]]:
        """Return the compiled loop that chooses the pairs of a range of documents (loops/pairs.make_pairs)."""

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

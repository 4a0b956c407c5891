"""The interface of a sample format: which samples a dataset becomes, and how rows hold them.

A format is one file with its settings (a DataSection without torch and numpy) and a SampleFormat. Its compiled loops
are imported when they run. One line of registry.py names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ModelSection, SmallInt
from ctxlm_ds.registry import load_object

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.index.record import SampleSettings
    from ctxlm_ds.data.index.sentence_table import SentenceTable
    from ctxlm_ds.data.sample import Samples
    from ctxlm_ds.tokenizers.base import Tokenizer

    Records = NDArray[Any]
    Numbers = NDArray[np.int64]
    Fill = Callable[[Samples, Numbers, Records, Numbers], int]

SINGLE_SPECIALS = 2
SMALLEST_ROOM = 2
"""Fewest tokens of text for which a row has room."""
MOST_PASSES = 1000


class SequenceTemplate(NamedTuple):
    """The special tokens around one text or two: [CLS] A [SEP], [CLS] A [SEP] B [SEP], <s> A </s></s> B </s>.

    Token types are 0 up to and including the first separator, 1 after it; a RoBERTa model ignores them.
    """

    cls_id: int
    sep_id: int
    pad_id: int
    double_separator: bool
    """Two separators between A and B (RoBERTa)."""
    vocab_size: int
    """A token of a dataset that is not below it is damaged."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SequenceTemplate:
        return cls(*(getattr(tokenizer, name) for name in cls._fields))


class Making(NamedTuple):
    """The input of SampleFormat.make."""

    dataset: IndexedDataset
    documents: tuple[int, int]
    """First document, and the one after the last."""
    settings: SampleSettings
    template: SequenceTemplate
    workers: int = 1
    """Threads; the samples do not depend on their number."""

    @property
    def sentences(self) -> tuple[int, int]:
        """The first sequence of the documents, and the one after the last."""
        first, after = self.dataset.arrays.documents[list(self.documents)].tolist()
        return first, after


class MadeSamples(NamedTuple):
    """The samples of a dataset while they are made."""

    documents: int
    sentences: int
    pieces: Iterator[tuple[Records, Numbers | None]]
    """[n] records (index/record.py), and [r] how many samples each row has that ends among them; None if packing forms
    the rows."""

    @classmethod
    def of_all(cls, making: Making, pieces: Iterator[Records]) -> MadeSamples:
        """Return samples of all documents and sentences, one per row or combined by packing."""
        (document, after), (sentence, end) = making.documents, making.sentences
        return cls(after - document, end - sentence, ((records, None) for records in pieces))


class SampleFormat(ABC):
    """The rules by which a dataset becomes samples."""

    name: ClassVar[str]
    section: ClassVar[type[DataSection]]
    makes_pairs: ClassVar[bool] = False
    """True if samples have a second segment; `sequence_label` says what its label means, if it has one."""
    sequence_label: ClassVar[str | None] = None
    """What the label of a sequence says (`next_sentence`); None if sequences have no label."""
    shifted: ClassVar[bool] = False
    """True if a sample's last token is only a label: what the last input predicts."""
    lane_directions: ClassVar[int] = 0
    """1 if rows are in lanes (DataSection.in_lanes), 2 if each also has a row of lanes that are read backward."""
    forms_rows: ClassVar[bool] = False
    """True if it says which samples share a row; otherwise each has a row, or data.packing combines them."""
    framing: ClassVar[str]
    """`module:function` of the compiled loop that writes samples; a format that defines `reader` has none."""
    looks_up_sentences: ClassVar[bool] = False
    """True if this loop takes the sentences of the dataset (SentenceTable) after the template."""
    sequence_labels: ClassVar[tuple[str, ...]] = ()
    """The meaning of each label of a sequence; empty if sequences have no label."""

    def __init_subclass__(cls) -> None:
        """Name the class as its settings do."""
        if "section" in vars(cls):
            cls.name = cls.section.model_fields["sample_format"].default

    def __init__(self) -> None:
        """Import the loops, so that a name that is not there is a ConfigError before data is read."""
        for role in (role for role in ("framing", "chooser") if hasattr(self, role)):
            load_object(getattr(self, role), f"the {role} of data.sample_format {self.name}")

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        """Return the settings that change the samples and that other formats do not have."""
        return {}

    def joins_sentences(self, data: DataSection) -> bool:
        """Return whether sentences follow each other without a separator.

        A byte-level BPE tokenizer must then encode the space between them (ctxlm preprocess --leading-space).
        """
        return True

    @abstractmethod
    def make(self, making: Making) -> MadeSamples:
        """Make every sample of the documents.

        Raises:
            ConfigError: seq_length is too short.
            DataError: the dataset lacks what the format needs.
        """

    def require_sentences(self, making: Making, is_split: bool) -> None:
        """Raise DataError if the sequences of the dataset are not sentences."""
        if not is_split:
            raise DataError(
                f"{making.dataset.prefix}: data.sample_format {self.name} needs sentences, but each sequence of this "
                "dataset is a document; preprocess it again with --split-sentences, or use doc_sentences or "
                "full_sentences"
            )

    def reader(self, dataset: IndexedDataset, template: SequenceTemplate) -> Fill:
        """Return the function that writes samples into their places: (samples, slots [c], records, numbers [c]).

        It fills everything of Samples except `starts` and `keys`, which are set, and returns INTACT, or the place in
        `numbers` of a damaged sample (loops/framing.py).
        """
        import numpy as np

        from ctxlm_ds.data.index.sentence_table import sentence_table

        table = (sentence_table(dataset, template.sep_id),) if self.looks_up_sentences else ()
        return partial(load_object(self.framing), np.asarray(dataset.tokens), template, *table)

    def token_counts(self, num_tokens: Numbers) -> Numbers:
        """Return how many tokens the samples with so many inputs have."""
        return num_tokens + self.shifted

    def second_starts(self, records: Records, numbers: Numbers, lengths: Numbers) -> Numbers:
        """Return the [c] positions from which token types are 1; a sample's length if it has one segment."""
        return lengths


class RowSection(DataSection):
    """Rows of one sequence, or with `packing` of several."""

    fixed: ClassVar[tuple[str, ...]] = (*DataSection.fixed, "packing", "max_sequences_per_row", "num_duplicates")
    by_sentence: ClassVar[bool] = True
    frames: ClassVar[bool] = True

    packing: bool = False
    """Put several short sequences into one row; they never see each other and their positions restart."""
    max_sequences_per_row: SmallInt = 8
    """Most sequences in one row when packing."""
    num_duplicates: Annotated[int, Field(ge=1, le=MOST_PASSES)] = 1
    """Passes over the corpus with newly drawn samples in one epoch (BERT's dupe_factor; 10 with static masking)."""

    @property
    def shares_rows(self) -> bool:
        return self.packing

    @staticmethod
    def special_tokens(double_separator: bool) -> int:
        """Return how many special tokens frame a sample; `double_separator` counts two between A and B."""
        return SINGLE_SPECIALS

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        yield from super().problems(model)
        special = self.special_tokens(model.double_separator)
        least = special + SMALLEST_ROOM
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


class RowFormat(SampleFormat):
    """A format of RowSection: samples of sentences, each framed by special tokens."""

    section: ClassVar[type[RowSection]]

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.index.sentence_table import sentence_table

        table = sentence_table(making.dataset, making.template.sep_id, making.documents)
        passes = range(making.settings.num_duplicates)
        pieces = ((records, None) for number in passes for records in self.records(table, making, number))
        return MadeSamples(table.num_documents, table.num_sentences, pieces)

    @abstractmethod
    def records(self, table: SentenceTable, making: Making, duplicate: int) -> Iterator[Records]:
        """Yield the records of pass `duplicate` in the order of the documents; raises what `make` raises."""

    def room(self, making: Making) -> int:
        """Return the most tokens of text in a sample, or raise a ConfigError if there is no room."""
        specials = self.section.special_tokens(making.template.double_separator)
        room = making.settings.seq_length - specials
        if room < SMALLEST_ROOM:
            raise ConfigError(
                f"data.seq_length {making.settings.seq_length} leaves {room} tokens next to {specials} special ones; "
                f"{self.name} needs at least {specials + SMALLEST_ROOM}"
            )
        return room

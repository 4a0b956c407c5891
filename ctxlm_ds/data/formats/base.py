"""What a sample format is to the rest of the system: which samples a dataset becomes, and how rows hold them.

A format is one file with its settings (a DataSection without torch and numpy) and a SampleFormat; compiled loops are
imported when they run. One line of registry.py names it.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from typing import ClassVar

from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.section import PositiveInt
from ctxlm_ds.recipe.sections import DataSection, ModelSection

SPECIAL_TOKENS_OF_SINGLE = 2


class SampleFormat(ABC):
    """How a dataset becomes samples."""

    name: ClassVar[str]
    section: ClassVar[type[DataSection]]
    makes_pairs: ClassVar[bool] = False
    """Whether a sample has a second segment and a label that says whether it follows the first."""
    shifted: ClassVar[bool] = False
    """Whether a sample's last token is a label only: what the last input predicts."""


class RowSection(DataSection):
    """Rows of one sequence, or with `packing` of several."""

    fixed: ClassVar[tuple[str, ...]] = (*DataSection.fixed, "packing", "max_sequences_per_row", "num_duplicates")
    by_sentence: ClassVar[bool] = True

    packing: bool = False
    """Put several short sequences into one row; they never see each other and their positions restart."""
    max_sequences_per_row: PositiveInt = 8
    """Most sequences in one row when packing."""
    num_duplicates: PositiveInt = 1
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
        return SPECIAL_TOKENS_OF_SINGLE

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

"""Rows of half a row of text and two segments, for models that carry states from row to row (XLNet)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from ctxlm_ds.data.formats.base import MOST_PASSES, MadeSamples, Making, SampleFormat
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, ModelSection

if TYPE_CHECKING:
    from ctxlm_ds.data.formats.base import Numbers, Records

LEAST_LENGTH = 10
"""Shortest row with two tokens for A and B."""


class TextAndPairSection(DataSection):
    """Rows of half a row of text, then two segments with separators and the classification token (XLNet).

    The first segment continues the text, and so does the same row of the next batch.
    """

    fixed: ClassVar[tuple[str, ...]] = (*DataSection.fixed, "num_duplicates", "both_directions")
    by_sentence: ClassVar[bool] = True
    ends_documents: ClassVar[bool] = True
    in_lanes: ClassVar[bool] = True

    sample_format: str = "text_and_pair"
    both_directions: bool = False
    """Read the text forward in half of the rows and backward in the others (XLNet's bi_data)."""
    num_duplicates: Annotated[int, Field(ge=1, le=MOST_PASSES)] = 1
    """Passes over the corpus with newly drawn segments in one epoch."""

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        yield from super().problems(model)
        if self.seq_length < LEAST_LENGTH:
            text = f"{self.seq_length} leaves no room for two segments in half a row; set at least {LEAST_LENGTH}"
            yield Problem("data.seq_length", text, ("data.sample_format",))


class TextAndPair(SampleFormat):
    """The rows of XLNet's create_tfrecords (loops/text_and_pair.py)."""

    section = TextAndPairSection
    makes_pairs = True
    lane_directions = 1
    sequence_label = "direction"
    sequence_labels = ("the text is read forward", "the text is read backward")
    framing = "ctxlm_ds.data.formats.loops.text_and_pair:frame_rows"

    def own_settings(self, data: DataSection) -> dict[str, Any]:
        return {"both_directions": data.both_directions}  # type: ignore[attr-defined]

    def make(self, making: Making) -> MadeSamples:
        from ctxlm_ds.data.formats.loops.text_and_pair import SPECIALS
        from ctxlm_ds.data.index.sentence_table import is_split

        dataset, length = making.dataset, making.settings.seq_length
        self.require_sentences(making, is_split(dataset))
        first, after = making.dataset.token_range(making.documents)
        if after - first <= length - SPECIALS:
            raise DataError(
                f"{dataset.prefix}: {after - first} tokens of text are not more than a row of data.seq_length {length} "
                "has; shorten the rows, or check what was preprocessed"
            )
        return MadeSamples.of_all(making, self._records(making, first, after))

    def _records(self, making: Making, first: int, after: int) -> Iterator[Records]:
        """Yield the records of tokens `first` to `after` - 1: those of all passes forward, then those backward."""
        from ctxlm_ds.data.formats.loops.text_and_pair import SPECIALS, RowSettings, TextStream, rows_of
        from ctxlm_ds.data.index.sentence_table import UNALIGNED, read_only, shift_of
        from ctxlm_ds.data.numba_random import stream_key

        settings, offsets = making.settings, read_only(making.dataset.arrays.offsets.view(UNALIGNED))
        (begin, end), shift = making.sentences, shift_of(making.dataset)
        half, key = settings.seq_length // 2, stream_key(settings.seed, self.name)
        for backward in (False, True) if settings.own["both_directions"] else (False,):
            text = TextStream(offsets, shift, begin, end - begin, first, after, backward)
            for duplicate in range(settings.num_duplicates):
                yield from rows_of(text, RowSettings(half, settings.seq_length - half - SPECIALS, key, duplicate))

    def second_starts(self, records: Records, numbers: Numbers, lengths: Numbers) -> Numbers:
        return lengths // 2 + records["a_end"][numbers] - records["a_start"][numbers] + 1

"""From lines of the sample index to Samples: the tokens, framed as the sample format frames them.

In: records, the dataset they point into. Out: Samples. Used for training and while the index is still being built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.formats.loops.framing import WHOLE
from ctxlm_ds.data.sample import Samples, empty_samples
from ctxlm_ds.errors import DataError

if TYPE_CHECKING:
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.formats.base import SampleFormat

LONGEST_SAMPLE = 1 << 16


class SampleReader:
    """Samples by number."""

    def __init__(
        self, records: NDArray[Any], dataset: IndexedDataset, template: SequenceTemplate, sample_format: SampleFormat
    ) -> None:
        self.records = records
        self.format = sample_format
        self._prefix = dataset.prefix
        self._vocab_size = template.vocab_size
        self._fill = sample_format.reader(dataset, template)

    def read(self, numbers: NDArray[np.int64]) -> Samples:
        """Return samples `numbers`, keyed by their number alone.

        Raises:
            DataError: the index or the dataset is damaged.
        """
        samples = empty_samples(self.lengths(numbers))
        self.fill(samples, np.arange(len(numbers)), numbers)
        samples.keys[:, 0] = numbers
        return samples

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the [c] tokens of samples `numbers` [c], special ones and a token that is a label only included.

        Raises:
            DataError: there is no such sample, or its record is damaged.
        """
        outside = (numbers < 0) | (numbers >= len(self.records))
        if outside.any():
            raise self._damaged(int(numbers[outside.argmax()]))
        lengths = self.records["num_tokens"][numbers].astype(np.int64) + self.format.shifted
        outside = (lengths < 1) | (lengths > LONGEST_SAMPLE)
        if outside.any():
            raise self._damaged(int(numbers[outside.argmax()]))
        return lengths

    def second_starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the [c] positions from which token types are 1 (the sample's length if there is no B)."""
        return self.format.second_starts(self.records, numbers, self.lengths(numbers))

    def fill(self, samples: Samples, slots: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Write samples `numbers` [c] into the places `slots` [c] of `samples`, which has their lengths; not the keys.

        Raises:
            DataError: the index or the dataset is damaged.
        """
        damaged = self._fill(samples, slots, self.records, numbers)
        if damaged != WHOLE:
            raise self._damaged(int(numbers[damaged]))

    def _damaged(self, number: int) -> DataError:
        return DataError(
            f"{self._prefix}: sample {number} of its index does not fit the dataset, whose tokens are below "
            f"{self._vocab_size}; run tools/inspect_dataset.py --verify, delete the folder of the index and "
            "build it again (tools/build_samples.py)"
        )

"""The unigram distribution of a dataset, with which held-out figures are compared; imports numpy when called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def unigram_figures(train_prefix: Path, heldout_prefix: Path) -> tuple[float, float]:
    """Return the loss of the unigram distribution, and how often its most frequent token is right."""
    from ctxlm_ds.data.dataset.reader import IndexedDataset

    probabilities, tokens = unigram(train_prefix), IndexedDataset(heldout_prefix).tokens
    return unigram_loss(train_prefix, heldout_prefix), float((tokens == probabilities.argmax()).mean())


def unigram_loss(train_prefix: Path, heldout_prefix: Path) -> float:
    """Return the cross entropy in nats of held-out tokens under the (add-one) unigram distribution of the training."""
    import numpy as np

    from ctxlm_ds.data.dataset.reader import IndexedDataset

    heldout = IndexedDataset(heldout_prefix).tokens
    return float(-np.log(unigram(train_prefix, int(heldout.max()) + 1))[heldout].mean())


def unigram(train_prefix: Path, least_size: int = 0) -> NDArray[np.float64]:
    """Return the (add-one) frequency of each token in the training text."""
    import numpy as np

    from ctxlm_ds.data.dataset.reader import IndexedDataset

    counts = np.bincount(IndexedDataset(train_prefix).tokens, minlength=least_size) + 1.0
    return counts / counts.sum()

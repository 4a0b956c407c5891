"""One masked span in each block of a text: a compiled loop over the samples of a micro-batch.

Source: microsoft/MASS MASS-summarization/mass/masked_dataset.py (`MaskedLanguagePairDataset`). The first token of a
sample is never masked, so every masked one has a token before it, which the decoder reads.

The words of a sample's stream (data/numba_random.py): word 3p of position p draws the begin of the span of a block that
begins there, word 3p + 1 what replaces the token at p, word 3p + 2 the random token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctxlm_ds.data.numba_random import below, compiled, stream, uniform, word_at
from ctxlm_ds.data.sample import Samples
from ctxlm_ds.objectives.corruption.arrays import Ids, Marks


class SpanRules(NamedTuple):
    """The rules of an objective."""

    share: float
    """Share of a block that is masked, rounded down, at least one token."""
    block_size: int
    keep_prob: float
    random_prob: float
    mask_id: int
    random_ids: Ids
    """Tokens to draw from."""


def span_size(length: int, share: float) -> int:
    """Return the masked tokens of a block of `length` tokens, at least 1."""
    return max(1, int(length * share))


_span_size = compiled(span_size)


@compiled
def mask_spans(samples: Samples, key: np.uint64, rules: SpanRules, input_ids: Ids, masked: Marks) -> None:
    """Write the inputs [t] of samples of t tokens, and True in `masked` [t] at masked tokens."""
    masked[:] = False
    input_ids[:] = samples.input_ids
    for number in range(len(samples.keys)):
        state = stream(key, samples.keys[number, 0], samples.keys[number, 1], samples.keys[number, 2])
        first, length = samples.starts[number], samples.starts[number + 1] - samples.starts[number]
        for block in range(1, length, rules.block_size):
            size = min(rules.block_size, length - block)
            count = _span_size(size, rules.share)
            begin = block + below(word_at(state, 3 * block), size - count + 1)
            masked[first + begin : first + begin + count] = True
            for position in range(begin, begin + count):
                draw = uniform(word_at(state, 3 * position + 1))
                if draw < rules.keep_prob:
                    continue
                token = rules.mask_id
                if draw < rules.keep_prob + rules.random_prob:
                    token = rules.random_ids[below(word_at(state, 3 * position + 2), len(rules.random_ids))]
                input_ids[first + position] = token

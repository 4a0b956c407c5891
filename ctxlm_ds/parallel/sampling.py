"""Draw words from logits whose words are split over tensor-parallel ranks.

Shape letters: b rows, p prediction slots, v vocabulary, n tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctxlm_ds.kernels.dropout import keyed_gumbel
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import first_over_ranks

MOST_WORDS = 1 << 31
"""Ids of the vocabulary are below this."""
NUMBERS_AT_A_TIME = 1 << 22
"""Logits that get their noise together, which bounds the memory."""


@torch.no_grad()
def draw_words(logits: Tensor, positions: Tensor, parallel: ParallelContext) -> Tensor:
    """Draw a word from softmax(logits) for every slot, the same one in every layout.

    The word has the largest sum of logit and Gumbel noise (Gumbel-max; Maddison 2014, section 2). The noise is a hash
    of (seed, step, row of the global batch, position, word), and of equal sums the first word wins.

    Args:
        logits: [b, p, v / n] of this rank's words.
        positions: [b, p] of the slots in their rows.
        parallel: the ranks, and the keys of the rows.

    Returns:
        [b, p] ids of the complete vocabulary.
    """
    num_words = logits.shape[-1]
    words = torch.arange(num_words, device=logits.device) + parallel.rank * num_words
    keys = parallel.dropout.row_keys(len(logits), logits)[:, None].expand_as(positions)
    slots = max(1, NUMBERS_AT_A_TIME // num_words)
    pieces = (values.split(slots) for values in (logits.flatten(0, 1), positions.flatten(), keys.flatten()))
    found = [
        (some + keyed_gumbel(place[:, None] * MOST_WORDS + words, key[:, None])).max(dim=-1)
        for some, place, key in zip(*pieces, strict=True)
    ]
    largest, word = (torch.cat(parts) for parts in zip(*found, strict=True))
    return first_over_ranks(largest, word, num_words, parallel).view_as(positions)

"""Draw words from logits whose words are split over tensor-parallel ranks.

Shape letters: b rows, p prediction slots, v vocabulary, n tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctxlm_ds.kernels.sampling import SamplingKernel
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import first_over_ranks


@torch.no_grad()
def draw_words(logits: Tensor, positions: Tensor, kernel: SamplingKernel, parallel: ParallelContext) -> Tensor:
    """Draw a word from softmax(logits) for every slot, the same one in every layout.

    The word has the largest sum of logit and Gumbel noise. The noise is a hash of (seed, step, row of the global batch,
    position, word), and of equal sums the first word wins.

    Args:
        logits: [b, p, v / n] of this rank's words.
        positions: [b, p] of the slots in their rows.
        kernel: finds the largest sum.
        parallel: the ranks, and the keys of the rows.

    Returns:
        [b, p] ids of the complete vocabulary.
    """
    num_words = logits.shape[-1]
    keys = parallel.dropout.row_keys(len(logits), logits)[:, None].expand_as(positions)
    largest, word = kernel(logits.flatten(0, 1), positions.flatten(), keys.flatten(), parallel.rank * num_words)
    return first_over_ranks(largest, word, num_words, parallel).view_as(positions)

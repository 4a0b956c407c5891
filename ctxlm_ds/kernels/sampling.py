"""The largest sum of logit and keyed Gumbel noise, which draws a word from a softmax (Maddison 2014, section 2).

Shape letters: k slots, v words of this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ctxlm_ds.kernels.dropout import keyed_gumbel
from ctxlm_ds.kernels.implementation import Implementation, compile_later, compiled_row

MOST_WORDS = 1 << 31
"""Ids of words are below this."""
CPU_PIECE, PIECE = 1 << 14, 1 << 22
"""Logits that get their noise together: few on a CPU, whose cache they should fit, and not all on other devices."""


SamplingKernel = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Finds the words that noisy logits draw; the arguments and results are those of largest_with_noise."""


def largest_with_noise(logits: Tensor, positions: Tensor, keys: Tensor, first_word: int) -> tuple[Tensor, Tensor]:
    """Add noise to logits [k, v]; return the largest sum of each slot, fp32 [k], and the first word that has it [k].

    `positions` [k] are those of the slots in their rows, `keys` [k] int64 those rows' keys. Words are returned from 0;
    the rank's first one is `first_word` of the complete vocabulary.
    """
    words = torch.arange(logits.shape[-1], device=logits.device) + first_word
    noise = keyed_gumbel(positions[:, None] * MOST_WORDS + words, keys[:, None])
    largest, word = (logits + noise).max(dim=-1)
    return largest, word


def in_pieces(logits: Tensor, positions: Tensor, keys: Tensor, first_word: int) -> tuple[Tensor, Tensor]:
    """Compute largest_with_noise for some slots at a time, which bounds the memory of the noise."""
    slots = max(1, (CPU_PIECE if logits.device.type == "cpu" else PIECE) // logits.shape[-1])
    pieces = zip(*(values.split(slots) for values in (logits, positions, keys)), strict=True)
    found = [largest_with_noise(some, places, rows, first_word) for some, places, rows in pieces]
    largest, word = (torch.cat(parts) for parts in zip(*found, strict=True))
    return largest, word


compiled_sampling: SamplingKernel = compile_later(largest_with_noise)
"""It stores no noise."""

IMPLEMENTATIONS = (
    # The noise has about 30 operations a word, each a pass over an accelerator's memory without fusion.
    compiled_row(lambda need: compiled_sampling, suits=lambda need: need.device_type != "cpu"),
    Implementation("torch", lambda need: in_pieces),
)

"""The softmax of both directions: sampled in training, over all words in evaluation.

Training compares each next word with words drawn from the log-uniform distribution, as tf.nn.sampled_softmax_loss:
logits less the logarithm of expected counts, and a drawn word that is the next word itself left out (Jean 2015). A draw
belongs to a direction and a micro-batch, so every data-parallel layout and a resume draw the same words.

Shape letters: b rows, s positions, k positions of a micro-batch (b·s), h width, w drawn words, v vocabulary, n
tensor-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.numba_random import compiled, uniform, word_at
from ctxlm_ds.families.elmo.config import ElmoSection
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.parallel.cross_entropy import chunk_rows, label_losses
from ctxlm_ds.parallel.layers import HiddenDropout, VocabParallelEmbedding, declare_split
from ctxlm_ds.parallel.mappings import reduce_from_ranks
from ctxlm_ds.parallel.parameters import ZEROS, Normal, ParameterFacts, declare
from ctxlm_ds.parallel.placement import VOCABULARY


class Candidates(NamedTuple):
    """Distinct words in ascending order."""

    words: NDArray[np.int64]
    """[count]"""
    tries: int
    """Words drawn until so many differed."""


def draw_candidates(key: np.uint64, count: int, vocab_size: int) -> Candidates:
    """Draw `count` distinct words of 0..vocab_size-1, at most vocab_size, always the same ones for a key."""
    words = np.empty(count, dtype=np.int64)
    tries = _draw(np.uint64(key), math.log1p(vocab_size), words, np.zeros(vocab_size, dtype=np.bool_))
    words.sort()
    return Candidates(words, int(tries))


def log_expected_counts(words: Tensor, candidates: Candidates, vocab_size: int) -> Tensor:
    """Return the fp32 logarithm of how often `words` (int, any shape) were expected among the candidates."""
    probability = (1.0 / (words.double() + 1.0)).log1p() / math.log1p(vocab_size)
    if candidates.tries == len(candidates.words):
        return (probability * candidates.tries).log().float()
    return (-torch.expm1(candidates.tries * torch.log1p(-probability))).log().float()


@compiled
def _draw(key: np.uint64, log_range: float, words: Any, drawn: Any) -> int:
    """Fill `words` with distinct ones, marked in `drawn` [v]; return the number of tries."""
    count = tries = 0
    while count < len(words):
        word = (np.int64(math.exp(uniform(word_at(key, tries)) * log_range)) - 1) % len(drawn)
        tries += 1
        if not drawn[word]:
            drawn[word] = True
            words[count] = word
            count += 1
    return tries


CANDIDATES = 2
"""First place of the keys of drawn words, after those of dropout."""


class SharedSoftmax(VocabParallelEmbedding):
    """The losses of both directions by one table [v, h] and bias [v], of which only the rows in use get gradients."""

    def __init__(self, model: ElmoSection, build: ModelBuild) -> None:
        assert model.vocab_size is not None
        width = model.projection_size
        super().__init__(model.vocab_size, width, Normal(width**-0.5), build.kernels, build.parallel)
        self.vocab_size, self.num_sampled = model.vocab_size, model.num_sampled
        self.bias = nn.Parameter(torch.zeros(self.num_rows))
        # The format of bilm-tf has no softmax, so weights may come without it.
        table = ParameterFacts(Normal(width**-0.5), decays=True, split=VOCABULARY, grows="vocabulary", optional=True)
        declare(self, weight=table)
        declare_split(self, build.parallel, bias=replace(table, init=ZEROS, decays=False))
        self.dropout = HiddenDropout(model.dropout, build.kernels, build.parallel)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, reversed_hidden: Tensor, labels: Tensor, reversed_labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compare hidden states [b, s, h] of both directions with their next words [b, s].

        Return of each direction the fp32 sum of the losses, and the number of labels that have the largest logit (of
        all words, or of those compared).
        """
        states = [self.dropout(x, place).flatten(0, 1) for place, x in enumerate((hidden, reversed_hidden))]
        next_words = [labels.flatten().long(), reversed_labels.flatten().long()]
        if self.training and self.num_sampled is not None:
            return self._sampled(states, next_words, self.num_sampled)
        return (*self._full(states[0], next_words[0]), *self._full(states[1], next_words[1]))

    def _full(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Compare hidden [k, h] with all words, some rows at a time."""
        size = chunk_rows(len(hidden), self.num_rows, hidden.device)
        sums = [
            torch.stack([part.sum() for part in label_losses(self.decode(x) + self.bias, own, self.parallel)])
            for x, own in zip(hidden.split(size), labels.split(size), strict=True)
        ]
        loss, correct = torch.stack(sums).sum(dim=0).unbind()
        return loss, correct.detach()

    def _sampled(self, states: list[Tensor], labels: list[Tensor], count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compare hidden states [k, h] with the next words [k] and `count` drawn ones."""
        keys = (self.parallel.dropout.word(CANDIDATES + direction) for direction in range(len(states)))
        drawn = [draw_candidates(key, count, self.vocab_size) for key in keys]
        words = [torch.from_numpy(each.words).to(labels[0].device, non_blocking=True) for each in drawn]
        known = [each.where(each != IGNORE_LABEL, 0) for each in labels]
        # One look-up for both directions: the gradient of each is as large as the table.
        parts = [x for pair in zip(known, words, strict=True) for x in pair]
        rows, biases = self._rows(torch.cat(parts))
        sizes = [len(part) for part in parts]
        tables, numbers = rows.split(sizes), biases.split(sizes)
        found: list[Tensor] = []
        for number, hidden in enumerate(states):
            own, other = 2 * number, 2 * number + 1
            logits = (hidden * tables[own]).sum(dim=-1).float() + numbers[own].float()
            rest = F.linear(hidden, tables[other], numbers[other]).float()
            expected = (drawn[number], self.vocab_size)
            losses, hits = sampled_losses(
                logits - log_expected_counts(known[number], *expected),
                rest - log_expected_counts(words[number], *expected), known[number], words[number],
            )  # fmt: skip
            counted = labels[number] != IGNORE_LABEL
            found += [losses.where(counted, 0.0).sum(), (hits & counted).sum(dtype=torch.float32)]
        return found[0], found[1], found[2], found[3]

    def _rows(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of the table [.., h] and of the bias [..] of all ranks' words."""
        if self.parallel.size == 1:
            return F.embedding(words, self.weight), self.bias[words]
        own = words - self.first_row
        elsewhere = (own < 0) | (own >= self.num_rows)
        own = own.masked_fill(elsewhere, 0)
        rows = F.embedding(own, self.weight).masked_fill(elsewhere[:, None], 0.0)
        biases = self.bias[own].masked_fill(elsewhere, 0.0)
        both = reduce_from_ranks(torch.cat([rows, biases[:, None]], dim=1), self.parallel)
        return both[:, :-1], both[:, -1]


def sampled_losses(logits: Tensor, rest: Tensor, labels: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy [k] of the next words among themselves and the drawn ones, and whether they are above.

    `logits` [k] are of the next words `labels`, `rest` [k, w] of the drawn `words`, ascending; both are fp32, and the
    values of rest that are of a position's next word are overwritten.
    """
    with torch.no_grad():
        places = torch.searchsorted(words, labels).clamp_(max=len(words) - 1)[:, None]
        same, detached = words[places] == labels[:, None], rest.detach()
        detached.scatter_(1, places, detached.gather(1, places).masked_fill(same, -math.inf))
        hits = logits > detached.amax(dim=1)
    return F.softplus(rest.logsumexp(dim=1) - logits), hits
